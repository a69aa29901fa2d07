"""What Kubernetes takes as the name of an object, a key, a value, a resource, a variable."""

import re

_PART = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_LABEL = re.compile(rf"(?=.{{1,63}}$){_PART}")
_SUBDOMAIN = re.compile(rf"(?=.{{1,253}}$){_PART}(\.{_PART})*")
_WORD = re.compile(r"(?=.{1,63}$)[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# Variables by which operator, torchrun and launcher tell a process its part in a job.
JOB_ENV = (
    r"PET_.*|TORCHELASTIC_.*|GPTDDP_.*|(MASTER|POD)_.*|WORLD_SIZE|(LOCAL_|NODE_|GROUP_)?RANK"
    r"|LOCAL_WORLD_SIZE"
)
# With what the manifest sets: a user's value would be overridden without a word, or break the
# rendezvous.
_RESERVED_ENV = re.compile(JOB_ENV + r"|HOSTNAME|HOME|TMPDIR|TORCH_DISABLE_SHARE_RDZV_TCP_STORE")

_SECRET = re.compile(r"(^|_)(TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?|KEY|APIKEY)($|_)", re.I)


def is_label(name: str) -> bool:
    """Can it name any object and be a label's value?"""
    return bool(_LABEL.fullmatch(name))


def is_subdomain(name: str) -> bool:
    """Can it name most objects?"""
    return bool(_SUBDOMAIN.fullmatch(name))


def is_key(text: str) -> bool:
    """Can it be the key of a label, an annotation or a taint: NAME or DOMAIN/NAME?"""
    domain, slash, name = text.rpartition("/")
    return bool(_WORD.fullmatch(name)) and (not slash or is_subdomain(domain))


def is_value(text: str) -> bool:
    """Can it be the value of a label or a taint?"""
    return not text or bool(_WORD.fullmatch(text))


def is_resource(text: str) -> bool:
    """Can it be a resource that a cluster has beside Kubernetes' own: DOMAIN/NAME?"""
    return "/" in text and is_key(text)


def is_variable(text: str) -> bool:
    """Can every shell read it as the name of a variable?"""
    return bool(_VARIABLE.fullmatch(text))


def is_reserved(text: str) -> bool:
    """Is it a variable that the operator, the launcher or the manifest sets?"""
    return bool(_RESERVED_ENV.fullmatch(text))


def is_secret(text: str) -> bool:
    """Is it a variable whose value must not stand in a manifest?"""
    return bool(_SECRET.search(text))
