"""Test the copy of the pages for the site: links to pages and files still work, and folders have
titles.
"""

from tools.build_site import ROOT, copy_pages, find_pages


def test_links_of_the_copy_lead_to_pages_or_copied_files(tmp_path):
    root, target = tmp_path / "root", tmp_path / "copy"
    (root / "docs").mkdir(parents=True)
    (root / "code").mkdir()
    (root / "code" / "a.py").write_text("pass\n")
    (root / "README.md").write_text("[page](docs/page.md#part) [site](https://x.org)")
    (root / "docs" / "page.md").write_text("[file](../code/a.py) [folder](../code) [gone](no.md)")
    (root / "docs" / "picture.svg").write_text("<svg/>")
    copy_pages(root, target)
    copied = {path.relative_to(target).as_posix() for path in target.rglob("*") if path.is_file()}
    assert copied == {"README.md", "docs/page.md", "docs/picture.svg", "code/a.py"}
    assert (target / "README.md").read_text() == (root / "README.md").read_text()
    shown = (target / "docs" / "page.md").read_text()
    assert shown == "[file](../code/a.py) folder (`code`) [gone](no.md)"


def test_every_page_is_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    pages = {path.relative_to(ROOT).as_posix() for path in find_pages(ROOT)}
    missing = {page for page in pages if page.endswith(".md") and f" {page}\n" not in navigation}
    assert missing == set()
