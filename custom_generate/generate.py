"""What `model.generate(..., custom_generate="<a clone of this repository>")` loads: the installed package.

The code lives in `talon_hf` only, so that a clone holds no second copy that could drift; transformers asks for
`pip install talon_hf` where it is missing. The repository on the Hub holds the modules themselves and needs nothing
installed: `talon-hf bundle DIR` writes it.
"""

from talon_hf.generate import generate

__all__ = ["generate"]
