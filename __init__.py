"""kvtailor: a torch.compile backend that tailors a model to the attention it proves."""

__version__ = "0.1.0"
