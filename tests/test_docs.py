"""The documentation names everything that exists, and nothing else."""

import ast
import re
from pathlib import Path

import pytest
from faults import table as faults

from gptddp import errors
from gptddp.cli import cli
from gptddp.config import Config, with_preset
from gptddp.k8s.cli.main import cli as k8s_cli
from gptddp.training.metrics import Metrics

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "operator/README.md", ROOT / "k8s/jobs/README.md"]
PAGES += [ROOT / "examples/README.md"]
PAGES += sorted((ROOT / "docs").glob("*.md"))
LINKED = [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
COMMANDS = [f"gptddp {name}" for name in cli.commands]
COMMANDS += [f"gptddp-k8s {name}" for name in k8s_cli.list_commands(None)]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_documented(command):
    """At least one page shows each command."""
    assert any(command in page.read_text() for page in PAGES)


def test_every_documented_command_exists():
    """The word after `gptddp` or `gptddp-k8s` on a page is one of their commands."""
    for page in PAGES:
        shown = re.findall(r"(?:\$ |`)(gptddp(?:-k8s)?) ([a-z]+)", page.read_text())
        assert {f"{program} {name}" for program, name in shown} <= set(COMMANDS), page


@pytest.mark.parametrize("page", LINKED, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_have_targets(page):
    """A link names a file of the repository, and its anchor is a heading there, as GitHub makes
    anchors."""
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", page.read_text()):
        there = page.parent / target if target else page
        assert there.exists(), target
        text = there.read_text() if anchor else ""
        headings = [
            re.sub(r"[^\w\- ]", "", h.lower()) for h in re.findall(r"^#+ (.*)$", text, re.M)
        ]
        assert not anchor or anchor in [h.replace(" ", "-") for h in headings], anchor


def test_a_message_that_names_a_page_says_where_it_is():
    """A message says that a page is one of the sources, as an installed package has none."""
    for path in sorted((ROOT / "gptddp").rglob("*.py")):
        tree = ast.parse(path.read_text())
        for statement in ast.walk(tree):
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                statement.value.value = ""  # omit a docstring
        texts = [it.value for it in ast.walk(tree) if isinstance(it, ast.Constant)]
        named = [it for it in texts if isinstance(it, str) and re.search(r"docs/.*\.md", it)]
        if path.name != "demo.py":  # `make demo` runs it from the sources
            assert all(re.search(r"docs/.*\.md of the sources", it) for it in named), path


def test_every_exit_code_is_documented():
    """The tables of exit codes have the code of every error class."""
    trainer, k8s = ((ROOT / f"docs/{page}.md").read_text() for page in ("train", "k8s"))
    for code in {k.exit_code for k in vars(errors).values() if hasattr(k, "exit_code")}:
        assert f"| {code} |" in (k8s if 100 <= code <= 127 else trainer)  # gptddp-k8s's own


def test_files_named_in_the_readme_exist():
    """The map of the package leads to real files."""
    tree = (ROOT / "README.md").read_text().split("## Where things are")[1].split("```")[1]
    folders: list[str] = []  # named by the less indented lines above
    for line in filter(None, tree.splitlines()):
        names = line.strip().split("  ")[0].split()  # a description follows two spaces
        del folders[(len(line) - len(line.lstrip())) // 2 :]
        for name in names:
            assert ROOT.joinpath(*folders, name).exists(), f"{'/'.join(folders)}: {name}"
        folders.append(names[0])


def test_files_that_answer_a_question_exist():
    """The table "where is what" and the guide for contributors lead to real files."""
    table = (ROOT / "docs/architecture.md").read_text().split("## Where is what")[1]
    answers = [row.split("|")[2] for row in table.splitlines() if row.startswith("| ")]
    names = re.findall(r"`([\w./-]+)`", "".join(answers))
    guide = (ROOT / "CONTRIBUTING.md").read_text()
    names += re.findall(r"`((?:gptddp|tests|docs|image)/[\w./-]+)`", guide)
    assert len(names) > 60
    assert [name for name in names if not (ROOT / name).exists()] == []


def numbers_of(text):
    """The numbers of the faults in the tables of a page."""
    return {int(number) for number in re.findall(r"^\| (\d+) \|", text, re.M)}


def test_the_table_of_depths_is_right():
    """The table of docs/train.md has the values that `--depth` gives without and with a GPU."""
    page = (ROOT / "docs/train.md").read_text()
    for depth in (2, 4, 8, 12, 20):
        row = f"| {depth} |"
        for preset in ("tiny", "gpt2"):
            c = with_preset(Config(preset=preset, depth=depth), accelerator=False)
            if preset == "tiny":
                millions = 12 * depth * c.n_embd**2 / 1e6
                row += f" {c.n_embd} | {millions:,.3g} M | {20 * millions:,.0f} M |"
            row += f" {c.batch} | {c.lr:.1e} | {c.steps:,} |"
        assert row in page, row


def test_every_fault_is_tested():
    """Faults 1 to 40 are on the page, each measured on a whole job or tested by a named test."""
    measured, _, elsewhere = faults.DOCS.read_text().partition("## Faults without timings")
    tests = "".join(path.read_text() for path in (ROOT / "tests/faults").glob("test_*.py"))
    rows = re.findall(r"pytest\.mark\.fault\((\d+)\)|^    \((\d+), \w", tests, re.M)
    marked = {2} | {int(a or b) for a, b in rows}
    whole = set(range(1, 41))
    assert marked | numbers_of(elsewhere) == whole
    assert numbers_of(measured) | numbers_of(elsewhere) == whole
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", elsewhere)
    assert len(named) > 25
    for path, function in named:
        wanted = f"def {function}(" if function else "def test_"
        assert wanted in (ROOT / path).read_text(), (path, function)


def test_the_page_of_faults_matches_its_measurements():
    """The measurements on the page give the same page again, with its summary."""
    page = faults.DOCS.read_text()
    rows = re.findall(r"^\| (\d+) \| (.*) \| (.*) \| ([\d.]*) \| ([\d.]*) \| (\d+) \|$", page, re.M)
    names = ("fault", "what", "happens", "seconds", "back_s", "redone")
    measured = [dict(zip(names, row, strict=True)) for row in rows]
    for it in measured:
        it |= {"fault": int(it["fault"]), "redone": int(it["redone"])}
        it |= {name: float(it[name] or "nan") for name in ("seconds", "back_s")}
    made, old = (re.sub(r"two cores \(.*", "", it) for it in (faults.page(measured, page), page))
    assert len(measured) > 40 and made == old  # except for the machine
    assert faults.page([], page) == page


@pytest.mark.parametrize("page", LINKED, ids=lambda page: str(page.relative_to(ROOT)))
def test_lines_are_short(page):
    """Lines have at most 110 characters, except in tables and code blocks."""
    printed, long = False, []
    for number, line in enumerate(page.read_text().splitlines(), 1):
        printed ^= line.startswith("```")
        if len(line) > 110 and not printed and not line.startswith("|"):
            long.append(number)
    assert long == []


def test_a_version_of_the_changelog_has_each_heading_once_and_in_order():
    """Headings are those of Keep a Changelog, in its order, and no entry is repeated."""
    for version in (ROOT / "CHANGELOG.md").read_text().split("\n## ")[1:]:
        headings = re.findall(r"^### (.*)$", version, re.M)
        order = ["Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"]
        assert headings == [it for it in order if it in headings], version.splitlines()[0]
        entries = re.split(r"^- ", version, flags=re.M)[1:]
        assert len(set(entries)) == len(entries)


def test_every_metric_is_documented():
    """docs/train.md names exactly our metrics that a scrape shows."""
    families = Metrics(Config(), None, peak=1.0, run_id="r").registry.collect()
    ours = {family.name for family in families if family.name.startswith("gptddp_")}
    page = (ROOT / "docs/train.md").read_text().split("## Metrics")[1]
    named = {re.sub("_(total|info)$", "", name) for name in re.findall(r"gptddp_\w+", page)}
    assert named == ours


def test_one_version_of_the_operator_is_named_everywhere():
    """The tests' cluster, the manifests, the documentation and the messages name one version."""
    built = re.search(r"OPERATOR=(\S+)", (ROOT / "tests/cluster/lib.sh").read_text())
    assert built
    for name in ("operator/kustomization.yaml", "operator/README.md", "gptddp/k8s/cluster.py"):
        assert set(re.findall(r"v1\.\d+\.\d+", (ROOT / name).read_text())) == {built[1]}, name
