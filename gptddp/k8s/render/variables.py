"""Environment variables of pods: reserved names, and variables that look like secrets."""

import re

# Variables by which operator, torchrun and launcher assign a process its role in a job.
JOB_ENV = (
    r"PET_.*|TORCHELASTIC_.*|GPTDDP_.*|(MASTER|POD)_.*|WORLD_SIZE|(LOCAL_|NODE_|GROUP_)?RANK"
    r"|LOCAL_WORLD_SIZE"
)
# With the manifest's own variables: a user's value would be silently overridden.
_RESERVED_ENV = JOB_ENV + r"|HOSTNAME|HOME|TMPDIR"

# Names whose values are secrets: GITHUB_PAT and PGPASSWORD, but not TOKENIZERS_PARALLELISM.
_SECRET = (
    r"(?i:PASSWORD|PASSWD|PASSPHRASE|SECRET|CREDENTIAL|(API|ACCESS|AUTH|PRIVATE)_?KEY|TOKEN($|_)"
    r"|(^|_)(KEY|PASS|AUTH|COOKIE|DSN)($|_)|_(PWD|PAT)$)"
)
# Values that are secrets under any name: prefixes of services' tokens, keys, and addresses with a
# password.
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
    """Must the variable's value not be in a manifest? The path of a file may be."""
    if re.fullmatch(_PATH, value) and re.search("CREDENTIAL|_(FILE|PATH|DIR)$", name, re.I):
        return False
    return bool(re.search(_SECRET, name) or re.match(_TOKEN, value))
