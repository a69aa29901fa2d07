"""What `gptddp sample` refuses."""

import math

from gptddp.errors import ConfigError


def check(prompt: str, temperature: float, top_k: int, top_p: float) -> None:
    """Raise ConfigError for the first value that is none; NaN is none either."""
    try:
        prompt.encode()
    except UnicodeEncodeError:  # the shell has given other bytes
        raise ConfigError("--prompt is not UTF-8: give text in UTF-8") from None
    if not 0 <= temperature < math.inf:
        raise ConfigError(f"--temperature is {temperature}: use 0 for the likeliest token, or more")
    if top_k < 0:
        raise ConfigError(f"--top-k is {top_k}: use 0 for all tokens, or more")
    if not 0 < top_p <= 1:
        raise ConfigError(f"--top-p is {top_p}: use more than 0, and at most 1 for all tokens")
