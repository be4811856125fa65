"""Files that a release needs, and that they agree with each other."""

import re
import tomllib

import pytest
import yaml

from . import address
from .notes import ROOT, notes, version


def test_a_release_has_the_notes_of_its_version_only():
    parts = (
        "# Changelog",
        "## 0.3.0 (unreleased)",
        "- New.",
        "## 0.2.0 (2026-12-01)",
        "- One.",
        "### Fixed",
        "- Two.",
        "## 0.1.0 (2026-11-01)",
        "- Old.",
    )
    changelog = "\n\n".join(parts) + "\n"
    assert notes("0.2.0", changelog) == "- One.\n\n### Fixed\n\n- Two.\n"
    assert notes("0.1.0", changelog) == "- Old.\n"
    for release in ("0.3.0", "0.2", "1.0.0"):
        with pytest.raises(SystemExit, match=f"no notes below a heading '## {release} "):
            notes(release, changelog)


HOST = "https://github.com/someone/fp8attn"


def test_what_is_published_has_the_address_of_the_repository():
    """pyproject.toml is as before but for the links."""
    text = address.readme((ROOT / "README.md").read_text(), HOST, "v0.2.0")
    assert f"```sh\ngit clone {HOST} fp8attn && cd fp8attn  # in a clone of this repository" in text
    before = (ROOT / "pyproject.toml").read_text()
    after = tomllib.loads(address.project(before, HOST, "v0.2.0"))
    assert after["project"].pop("urls")["Repository"] == HOST
    assert after == tomllib.loads(before)


@pytest.mark.parametrize("name", ["README.md", "CHANGELOG.md", "plugins/sglang/README.md"])
def test_links_of_what_is_published_are_files_of_the_tag(name):
    here, write = (ROOT / name).read_text(), address.FILES.get(name, address.linked)  # the notes are of CHANGELOG.md
    text = write(here, HOST, "v0.2.0")
    links = re.findall(r"(!?)\[[^\]]*\]\(([^)]*)\)", text)
    for image, link in links:
        path = link.removeprefix(f"{HOST}/{'raw' if image else 'blob'}/v0.2.0/").partition("#")[0]
        assert link.startswith(("https://", "#")) and ("://" in path or not path or (ROOT / path).exists()), link
    assert len(links) == len(re.findall(r"\]\(", here)) > 2


def test_one_version_everywhere():
    """The package's version is the newest of CHANGELOG.md and that of CITATION.cff, without what marks it as not
    released.
    """
    released = version().partition(".dev")[0]
    [newest, *_] = re.findall(r"^## (\S+) \(", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest == released
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == released


def test_workflows_run_what_the_makefile_has():
    [targets] = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    versions = {line.rpartition(" ")[2] for line in project["classifiers"] if re.search(r":: 3\.\d+$", line)}
    for name in ("ci", "publish"):
        text = (ROOT / f".github/workflows/{name}.yml").read_text()
        workflow = yaml.safe_load(text)
        assert set(re.findall(r"run: make (\S+)", text)) <= set(targets.split())
        if name == "ci":
            assert set(workflow["jobs"]["test"]["strategy"]["matrix"]["python-version"]) == versions
    steps = re.findall(r"^make (\S+)", (ROOT / ".ci/run").read_text(), re.MULTILINE)
    assert steps == ["demo", "test", "test-rest"]  # each before anything that only the next one needs


def test_every_test_is_run_by_one_target():
    """`make test` and `make test-rest` have complementary markers, and only `make release` has those that both leave
    out.
    """
    text = (ROOT / "Makefile").read_text()
    markers = {
        target: re.findall(rf"^{target}:.*\n(?:\t.*\n)*?\t\$\(PYTEST\) -m \"([^\"]*)\" ", text, re.MULTILINE)
        for target in ("test", "test-rest")
    }
    assert markers == {"test": ["not slow and not release"], "test-rest": ["slow and not release"]}
    assert re.search(r"^\t.*\$\(PYTEST\) tests/release", text, re.MULTILINE)


def test_tables_of_versions_are_those_of_the_project():
    """docs/compatibility.md names the pinned versions, and the range of each extra."""
    page = (ROOT / "docs/compatibility.md").read_text()
    pinned = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    for package in ("torch", "triton", "transformers", "diffusers"):
        assert pinned[package] in page, package
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    oldest = re.search(r"vllm>=([\d.]+),<([\d.]+)", extras["vllm"][0])
    assert f"{oldest[1]} to 0.{int(oldest[2].split('.')[1]) - 1}" in page
