"""What Kubernetes takes as the name of an object, a key, a resource, an image; variables of a pod.

Patterns are compiled by the first question for them, as a start is not to pay for all.
"""

import re

_LOWER = frozenset("abcdefghijklmnopqrstuvwxyz0123456789")
_WORD = r"(?=.{1,63}$)[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?"
# Variables by which operator, torchrun and launcher tell a process its part in a job.
JOB_ENV = (
    r"PET_.*|TORCHELASTIC_.*|GPTDDP_.*|(MASTER|POD)_.*|WORLD_SIZE|(LOCAL_|NODE_|GROUP_)?RANK"
    r"|LOCAL_WORLD_SIZE"
)
# With what the manifest sets: a user's value would be overridden without a word, or break the
# rendezvous.
_RESERVED_ENV = JOB_ENV + r"|HOSTNAME|HOME|TMPDIR|TORCH_DISABLE_SHARE_RDZV_TCP_STORE"

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
_COMPONENT = r"[a-z0-9]+((\.|__?|-+)[a-z0-9]+)*"
_HOST = r"[A-Za-z0-9]([-A-Za-z0-9]*[A-Za-z0-9])?"
_IMAGE = (
    rf"((localhost|{_HOST}(\.{_HOST})+|{_HOST}(?=:)|\[[0-9a-fA-F:]+\])(:\d{{1,5}})?/)?"
    rf"{_COMPONENT}(/{_COMPONENT})*"
    r"(:[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?(@[A-Za-z][A-Za-z0-9_+.-]*:[0-9a-fA-F]{32,})?"
)


def is_label(name: str) -> bool:
    """Can it name any object and be a label's value?"""
    return len(name) <= 63 and _is_part(name)


def is_subdomain(name: str) -> bool:
    """Can it name most objects?"""
    return len(name) <= 253 and all(map(_is_part, name.split(".")))


def _is_part(text: str) -> bool:
    ends = text[:1], text[-1:]
    return _LOWER.issuperset(ends) and _LOWER.issuperset(text.replace("-", ""))


def is_key(text: str) -> bool:
    """Can it be the key of a label, an annotation or a taint: NAME or DOMAIN/NAME?"""
    domain, slash, name = text.rpartition("/")
    return bool(re.fullmatch(_WORD, name)) and (not slash or is_subdomain(domain))


def is_claim_path(text: str) -> bool:
    """Is it CLAIM or CLAIM/PATH, whose path stays in the claim?"""
    claim, _, path = text.partition("/")
    return is_subdomain(claim) and ".." not in path.split("/")


def is_resource(text: str) -> bool:
    """Can it be a resource that a cluster has beside Kubernetes' own: DOMAIN/NAME?"""
    return "/" in text and is_key(text)


def is_reserved(text: str) -> bool:
    """Is it a variable that the operator, the launcher or the manifest sets?"""
    return bool(re.fullmatch(_RESERVED_ENV, text))


def is_secret(name: str, value: str = "") -> bool:
    """Is it a variable whose value must not stand in a manifest? The path of a file may."""
    if re.fullmatch(_PATH, value) and re.search("CREDENTIAL|_(FILE|PATH|DIR)$", name, re.I):
        return False
    return bool(re.search(_SECRET, name) or re.match(_TOKEN, value))


def is_image(text: str) -> bool:
    """Can a node pull it: [HOST[:PORT]/]NAME[:TAG][@DIGEST], its name in lower case?"""
    return bool(re.fullmatch(_IMAGE, text))
