"""`gptddp-k8s rules`: every rule by its id."""

import ast
import json
import re

import pytest
from click.testing import CliRunner
from support.paths import ROOT

from gptddp.k8s.cli.main import cli
from gptddp.k8s.render import admission, catalogue
from gptddp.k8s.render.spec_rule import SPEC_RULES


def rules(*args):
    return CliRunner().invoke(cli, ["rules", *args])


def test_every_rule_is_listed_with_field_rule_and_fix():
    """Those of options and of manifests, and none that is no rule any more."""
    listed = json.loads(rules("-o", "json").stdout)
    assert all(all(rule.values()) for rule in listed)
    assert {rule["id"] for rule in listed if rule["of"] == "options"} == set(SPEC_RULES)
    manifests = {rule["id"] for rule in listed if rule["of"] == "manifest"}
    assert manifests == {*admission.JOB_RULES, *catalogue.STRUCTURE}
    assert set(catalogue.FIXES) == {*SPEC_RULES, *admission.JOB_RULES}
    assert len(listed) == len({rule["id"] for rule in listed})


def test_every_id_that_a_message_can_end_with_is_listed():
    """No module of render makes a Problem with an id that `rules` does not know."""
    made = set()
    for name in ("crd", "documents", "validate", "admission"):
        tree = ast.parse((ROOT / f"gptddp/k8s/render/{name}.py").read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Problem":
                made |= {node.args[0].value} if isinstance(node.args[0], ast.Constant) else set()
    assert made == set(catalogue.STRUCTURE)


def test_one_rule_as_text():
    """Its four parts, a line each."""
    text = rules("grace").stdout
    assert re.match(r"grace  \(options\)\n  field: --grace-s\n  rule:  .*\n  fix:   use ", text)
    assert rules("grace", "grace").stdout == text


@pytest.mark.parametrize(("id", "words"), [("replica-cout", "did you mean 'replica-count'?")])
def test_an_unknown_id_is_refused(id, words):
    """With the one that was meant."""
    done = rules(id)
    assert done.exit_code == 2 and words in done.stderr and not done.stdout
