from torch import fx
from kvtailor.passes.report import PassReport


def recognise_attention(gm: fx.GraphModule) -> PassReport:
    return PassReport()
