"""Test that files in the allowed folder are read, and no others."""

import os
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from vllm.multimodal.fetching.local_file import local_path, read_below


@pytest.fixture
def folder(tmp_path):
    inside = tmp_path / "pictures"
    (inside / "deep").mkdir(parents=True)
    (inside / "a.png").write_bytes(b"pixels")
    (inside / "deep" / "b c.png").write_bytes(b"more")
    (tmp_path / "secret").write_bytes(b"secret")
    (tmp_path / "pictures-2").mkdir()
    (tmp_path / "pictures-2" / "a.png").write_bytes(b"secret")
    (inside / "inner").symlink_to("deep/b c.png")
    (inside / "folder").symlink_to("deep")
    (inside / "outer").symlink_to("../secret")
    (inside / "up").symlink_to("..")
    (inside / "etc").symlink_to("/etc")
    (inside / "loop").symlink_to("loop")
    os.mkfifo(inside / "fifo")
    return Path(os.path.realpath(inside))


def read(folder, url, max_bytes=100):
    return read_below(folder, local_path(urlsplit(url)), max_bytes)


@pytest.mark.parametrize(
    ("path", "content"),
    [
        ("a.png", b"pixels"),
        ("deep/b%20c.png", b"more"),
        ("deep/../a.png", b"pixels"),
        ("inner", b"more"),
        ("folder/b c.png", b"more"),
    ],
)
def test_files_of_the_folder_are_read(folder, path, content):
    assert read(folder, f"file://{folder}/{path}") == content
    assert read(folder, f"file://localhost{folder}/{path}") == content


@pytest.mark.parametrize(
    "path",
    [
        *("../secret", "deep/../../secret", "%2e%2e/secret", "..%2fsecret"),
        *("outer", "up/secret", "etc/passwd", "../pictures-2/a.png", "../missing", "/etc/passwd"),
    ],
)
def test_files_outside_are_refused_whether_they_exist_or_not(folder, path):
    with pytest.raises(PermissionError, match="not in the folder whose files may be read"):
        read(folder, f"file://{folder}/{path}" if path[0] != "/" else f"file://{path}")


@pytest.mark.parametrize(
    ("path", "error"),
    [
        ("fifo", "not a regular file"),
        ("deep", "not a regular file|directory"),
        ("", "not a regular file|directory"),
        ("missing", "No such file"),
        ("a.png/x", "Not a directory"),
        ("loop", "symbolic links"),
    ],
)
def test_only_regular_files_are_read(folder, path, error):
    with pytest.raises(OSError, match=error):
        read(folder, f"file://{folder}/{path}")


def test_devices_are_not_read():
    with pytest.raises(OSError, match="not a regular file"):
        read(Path("/dev"), "file:///dev/zero")


def test_a_link_that_is_made_after_the_path_was_resolved_is_refused(folder, monkeypatch):
    monkeypatch.setattr(os.path, "realpath", str)
    for path in ("outer", "up/secret", "etc/passwd"):
        with pytest.raises(OSError, match=r"symbolic links|Not a directory"):
            read(folder, f"file://{folder}/{path}")


def test_a_file_that_is_too_large_is_refused(folder):
    assert read(folder, f"file://{folder}/a.png", max_bytes=6) == b"pixels"
    with pytest.raises(ValueError, match="at most 5 bytes"):
        read(folder, f"file://{folder}/a.png", max_bytes=5)


@pytest.mark.parametrize(
    "url", ["file://host/a", "file:a", "file:", "file://localhost", "file:///a%00b", "file://@/a"]
)
def test_a_url_names_an_absolute_path_of_this_machine(url):
    with pytest.raises(ValueError, match="must be file:// and an absolute path"):
        local_path(urlsplit(url))
