"""Environment variables of pods: which are not for a user to set, and which are secrets."""

import re

# Variables by which operator, torchrun and launcher tell a process its part in a job.
JOB_ENV = (
    r"PET_.*|TORCHELASTIC_.*|GPTDDP_.*|(MASTER|POD)_.*|WORLD_SIZE|(LOCAL_|NODE_|GROUP_)?RANK"
    r"|LOCAL_WORLD_SIZE"
)
# With what the manifest sets: a user's value would be overridden without a word.
_RESERVED_ENV = JOB_ENV + r"|HOSTNAME|HOME|TMPDIR"

# Names whose values are secrets: GITHUB_PAT and PGPASSWORD, and not TOKENIZERS_PARALLELISM.
_SECRET = (
    r"(?i:PASSWORD|PASSWD|PASSPHRASE|SECRET|CREDENTIAL|(API|ACCESS|AUTH|PRIVATE)_?KEY|TOKEN($|_)"
    r"|(^|_)(KEY|PASS|AUTH|COOKIE|DSN)($|_)|_(PWD|PAT)$)"
)
# Values that are, whatever the name: what services give their tokens to begin with, keys, and
# addresses with a password.
_TOKEN = (
    r"(gh[pousr]|github_pat|glpat|hf|xox[abprs]|npm|pypi|dckr_pat)[-_][A-Za-z0-9_-]{16,}"
    r"|sk-[A-Za-z0-9_-]{16,}|(AKIA|ASIA)[A-Z0-9]{16}|-----BEGIN [A-Z ]*PRIVATE KEY"
    r"|[a-z][a-z0-9+.-]*://[^/\s:@]*:[^/\s@]+@"
)
_PATH = r"/[^\s=]*"


def is_reserved(text: str) -> bool:
    """Is it a variable that the operator, the launcher or the manifest sets?"""
    return bool(re.fullmatch(_RESERVED_ENV, text))


def is_secret(name: str, value: str = "") -> bool:
    """Is it a variable whose value must not stand in a manifest? The path of a file may."""
    if re.fullmatch(_PATH, value) and re.search("CREDENTIAL|_(FILE|PATH|DIR)$", name, re.I):
        return False
    return bool(re.search(_SECRET, name) or re.match(_TOKEN, value))
