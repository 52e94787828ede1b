"""Write docs/api.md from the docstrings of what users import.

python docs/make_api.py
"""

from __future__ import annotations

import ast
import inspect
from importlib import import_module
from pathlib import Path
from typing import Any

import kvtailor

PAGE = Path(__file__).with_name("api.md")
HEAD = """# API

Made by `python docs/make_api.py` from the docstrings. Letters in shapes: B batch, T tokens, H
heads, D head dim, N packed rows, S sequences, R narrowed rows, C chunk, W window.
"""

# Module -> names; beside what `import kvtailor` offers.
MORE: dict[str, tuple[str, ...]] = {
    "kvtailor.backend": ("Recorder", "StrictError"),
    "kvtailor.config": ("Options",),
    "kvtailor.cli.inspection": ("Request", "run_inspection", "InspectError"),
    "kvtailor.passes.report": ("GraphReport", "AttentionSite", "PassReport", "PieceReport"),
    "kvtailor.passes.graph": ("emit", "sites"),
    "kvtailor.passes.inline": ("inline", "replace"),
    "kvtailor.runtime.kv.spec": (
        "FullSpec",
        "SlidingSpec",
        "ChunkedSpec",
        "CrossSpec",
    ),
    "kvtailor.runtime.kv.layout": ("KVLayout", "layer_specs"),
    "kvtailor.runtime.kv.hybrid": ("HybridManager",),
}


def entry(name: str, thing: Any) -> str:
    """Heading, signature and docstring; of a class, its public methods too."""
    lines = [f"### {name}", ""]
    if inspect.isclass(thing) and issubclass(thing, BaseException):
        return "\n".join([*lines, doc(thing), ""])
    lines += [f"```text\n{signature(name, thing)}\n```", "", doc(thing), ""]
    if inspect.isclass(thing):
        for key, value in vars(thing).items():
            function = getattr(value, "__func__", getattr(value, "fget", value))
            if key.startswith("_") or not inspect.isfunction(function) or not function.__doc__:
                continue
            call = key if isinstance(value, property) else signature(key, function)
            call = " ".join(call.split()).replace("( ", "(").replace(", )", ")")
            lines += [f"- `{call}`: {' '.join(doc(function).split())}"]
    return "\n".join(lines).rstrip() + "\n"


def doc(thing: Any) -> str:
    text = inspect.getdoc(thing)
    assert text, f"{thing} needs a docstring"
    # Their double backticks are Markdown's single ones.
    return text.replace("``", "`")


def signature(name: str, thing: Any) -> str:
    """As it is written in the source, one parameter per line where it is long."""
    parts: list[str] = []
    written = inspect.get_annotations(thing) if inspect.isclass(thing) else {}
    found = inspect.signature(thing)
    star = False
    for parameter in found.parameters.values():
        if parameter.name == "self":
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not star:
            star = True
            parts.append("*")
        mark = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        star = star or mark == "*"
        text = mark + parameter.name
        annotation = written.get(parameter.name, parameter.annotation)
        if isinstance(annotation, str) and annotation.startswith("Annotated["):
            # The rule and the help of an option are the command's.
            whole: Any = ast.parse(annotation, mode="eval").body
            annotation = ast.unparse(whole.slice.elts[0])
        if annotation is not parameter.empty:
            text += f": {annotation if isinstance(annotation, str) else annotation.__name__}"
        if parameter.default is not parameter.empty:
            default = repr(parameter.default)
            text += f" = {default if len(default) < 40 else '...'}"
        parts.append(text)
    inside = ", ".join(parts)
    if len(name) + len(inside) > 90:
        inside = "\n    " + ",\n    ".join(parts) + ",\n"
    back = found.return_annotation
    gives = f" -> {back}" if isinstance(back, str) and back != "None" else ""
    return f"{name}({inside}){gives}"


def page() -> str:
    parts = [HEAD, "## kvtailor\n"]
    parts += [
        entry(f"kvtailor.{name}", getattr(kvtailor, name))
        for name in kvtailor.__all__
        if not name.startswith("__")
    ]
    for module, names in MORE.items():
        parts += [f"## {module}\n"]
        parts += [entry(name, getattr(import_module(module), name)) for name in names]
    return "\n".join(parts).rstrip() + "\n"


def main() -> None:
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
