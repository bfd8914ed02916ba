"""Test URLs of clients: which are fetched, and which are refused before a connection is made."""

import asyncio
import contextlib
import os
import re
import shutil
import socket
import ssl
import subprocess

import pytest

from tests.loops import loop_over
from vllm.errors import ConfigError, RequestError
from vllm.multimodal.fetching import fetch as fetch_module
from vllm.multimodal.fetching import http_get
from vllm.multimodal.fetching.fetch import MediaFetcher, show_url
from vllm.multimodal.fetching.http_get import Answer

NAME = "pictures.test"
PUBLIC, PRIVATE = "93.184.215.14", "10.0.0.1"
OK = b"HTTP/1.1 200 OK\r\n"
LONG_S = 60.0


class Resolver:
    """Knows the addresses of some names, and returns the answers for a name one after another."""

    def __init__(self, **answers):
        self.answers = {name.replace("_", "."): list(each) for name, each in answers.items()}
        self.asked = []

    async def __call__(self, host, port):
        self.asked.append((host, port))
        return self.answers[host].pop(0)


def make_fetcher(domains=(), *, folder=None, timeout_s=LONG_S, **options):
    return MediaFetcher(folder, domains, timeout_s={"image": timeout_s, "audio": 1}, **options)


async def local(host, port):
    return ["127.0.0.1"]


@contextlib.asynccontextmanager
async def serving(answers, tls=None):
    """Start a server with one answer for each connection; yield its port and the requests that it
    gets.

    An answer is bytes, or a function that gets a writer.
    """
    requests, tasks = [], []

    async def handle(reader, writer):
        tasks.append(asyncio.current_task())
        with contextlib.suppress(ConnectionError, asyncio.CancelledError):
            requests.append((await reader.readuntil(b"\r\n\r\n")).decode())
            answer = answers[len(requests) - 1]
            if callable(answer):
                await answer(writer)
            else:
                writer.write(answer)
                writer.close()
                await writer.wait_closed()
        writer.transport.abort()

    server = await asyncio.start_server(handle, "127.0.0.1", 0, ssl=tls)
    try:
        yield server.sockets[0].getsockname()[1], requests
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def serve_and_fetch(answers, path="/a.png", *, name=NAME, tls=None, **options):
    """Fetch from such a server; return its answer, and the requests that it got."""

    async def run():
        fetcher = make_fetcher([name], resolve=local, **options)
        async with serving(answers, tls) as (port, requests):
            url = f"http{'s' if tls else ''}://{name}:{port}{path}"
            return await fetcher.fetch(url, "image", "m[0]"), requests

    return asyncio.run(run())


@pytest.fixture
def connections(monkeypatch):
    """Return the list of requests that would have been sent, with their addresses. All are answered
    with "pixels".
    """
    sent = []

    async def get(target, addresses, max_bytes, budget):
        sent.append((target, list(addresses)))
        return Answer(status=200, body=bytearray(b"pixels"))

    monkeypatch.setattr(fetch_module, "get", get)
    return sent


def refusal(fetcher, url, budget=None):
    with pytest.raises(RequestError) as error:
        asyncio.run(fetcher.fetch(url, "image", "m[0]", budget))
    assert error.value.param == "m[0]"
    assert str(error.value).startswith("m[0]: ")
    return str(error.value)


# ---- hosts that may be requested -----------------------------------------------------------------


def test_a_public_host_is_asked_at_the_addresses_that_were_checked(connections):
    resolver = Resolver(pictures_test=[[PUBLIC, "2606:4700::1"], [PRIVATE]])
    fetcher = make_fetcher(resolve=resolver)
    url = f"HTTP://{NAME.upper()}.:8080/a b?c=d e#f"
    assert asyncio.run(fetcher.fetch(url, "image", "m")) == b"pixels"
    [(target, addresses)] = connections
    assert addresses == [PUBLIC, "2606:4700::1"]
    assert resolver.asked == [(NAME, 8080)], "a name is resolved once"
    lines = target.request().decode().split("\r\n")
    assert lines[:2] == ["GET /a%20b?c=d%20e HTTP/1.1", f"Host: {NAME}:8080"]


@pytest.mark.parametrize(
    "addresses",
    [
        [PRIVATE],
        ["127.0.0.1"],
        ["::1"],
        ["169.254.169.254"],
        ["::ffff:10.0.0.1"],
        ["64:ff9b::a00:1"],
        ["fe80::1%eth0"],
        [PUBLIC, PRIVATE],
        ["2606:4700::1", "fd00::1"],
    ],
)
def test_a_name_with_any_private_address_is_refused(connections, addresses):
    text = refusal(make_fetcher(resolve=Resolver(pictures_test=[addresses])), f"http://{NAME}/a")
    assert "the host 'pictures.test' is not on the public internet" in text
    assert not any(address in text for address in addresses), "it describes no network"
    assert not connections


@loop_over(
    "host",
    [
        *(
            "127.0.0.1",
            "10.0.0.1",
            "169.254.169.254",
            "[::1]",
            "[::ffff:7f00:1]",
            "[2002:7f00:1::]",
        ),
        *("0.0.0.0", "224.0.0.1", "255.255.255.255", "[fd00::1]", "[64:ff9b::7f00:1]", "localhost"),
        *("127.1", "2130706433", "0x7f000001", "0177.0.0.1", "１２７.0.0.1", "127。0。0。1"),
        *("[fe80::1%25eth0]", "[fe80::1%eth0]", "127.0.0.1.", "localhost.", "ⓛocalhost"),
        *("user@127.0.0.1", "1.1.1.1@127.0.0.1", "1.1.1.1\\@127.0.0.1", "127.0.0.1\\@1.1.1.1"),
        *(
            "127.0.0.1:80",
            "127.0.0.1:0",
            "127.0.0.1:x",
            "127.0.0.1:99999",
            "[::1",
            "",
            ":80",
            ".",
            " ",
        ),
    ],
)
def test_no_spelling_of_a_private_address_is_asked(connections, host):
    text = refusal(make_fetcher(), f"http://{host}/a")  # use the resolver of the operating system
    assert re.search("not on the public internet|not accepted|Invalid|IPv", text), text
    assert not connections


@pytest.mark.parametrize(
    ("url", "line"),
    [
        ("http://[2606:4700::1]/", "Host: [2606:4700::1]"),
        ("http://[2606:4700::1]:8080/", "Host: [2606:4700::1]:8080"),
        ("https://1.1.1.1:443", "Host: 1.1.1.1"),
        ("http://1.1.1.1", "GET / HTTP/1.1"),
        ("http://1.1.1.1?a=b", "GET /?a=b HTTP/1.1"),
        ("http://1.1.1.1/%41/é\x01/a\r\nX: y", "GET /%41/%C3%A9%01/aX:%20y HTTP/1.1"),
    ],
)
def test_a_request_has_the_host_and_the_path_of_its_url(connections, url, line):
    asyncio.run(make_fetcher().fetch(url, "image", "m"))
    [(target, _)] = connections
    lines = target.request().decode().split("\r\n")
    assert line in lines
    assert len(lines) == 8 and lines[-2:] == ["", ""]


def test_only_named_hosts_are_asked_when_there_are_any(connections):
    resolver = Resolver(pictures_test=[[PRIVATE]], xn____intern_cua_test=[[PRIVATE]])
    resolver.answers["xn--bcher-kva.test"] = [[PRIVATE]]
    fetcher = make_fetcher([f"{NAME.upper()}.", "bücher.test", "10.0.0.2"], resolve=resolver)
    for url in (f"https://{NAME}/a", "http://BÜCHER.test/a"):
        assert asyncio.run(fetcher.fetch(url, "image", "m")) == b"pixels"
    for url in ("http://1.1.1.1/", "http://10.0.0.1/", f"http://a.{NAME}/", f"http://{NAME}.com/"):
        assert "--allowed-media-domains does not name it" in refusal(fetcher, url)
    assert [addresses for _, addresses in connections] == [[PRIVATE]] * 2


@pytest.mark.parametrize(
    ("domain", "message"),
    [("http://a.com", "Name hosts only"), ("a.com:80", "IP address"), ("127.1", "IP address")],
)
def test_a_malformed_domain_is_an_error_of_the_configuration(domain, message):
    with pytest.raises(ConfigError, match=f"--allowed-media-domains {domain!r}: .*{message}"):
        make_fetcher([domain])


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("ftp://a/b", "'ftp://a/b' must begin with http:, https:, data: or file:"),
        ("/etc/passwd", "must begin with"),
        ("", "'' must begin with"),
        ("gopher://127.0.0.1:25/x", "must begin with"),
        ("http://[::1/a", "Invalid IPv6"),
        (f"http://{NAME}/{'x' * 500}", "xxx...': "),
        ("data:image/png;base64,AAAA!" + "A" * 400, "m[0]: its base64 has"),
    ],
)
def test_a_refusal_names_the_item_and_shows_little_of_the_url(url, message):
    text = refusal(make_fetcher(["other.test"]), url)
    assert message in text
    assert len(text) < 420


def test_the_content_of_a_data_url_is_not_shown():
    assert show_url("DATA:image/png;base64,AAAA") == "data:..."
    assert show_url("http://a/" + "b" * 300) == "http://a/" + "b" * 191 + "..."


def test_fetches_are_counted_with_those_that_fail():
    async def run():
        fetcher = make_fetcher()
        await fetcher.fetch("data:,a", "image", "x")
        with pytest.raises(RequestError):
            await fetcher.fetch("http://10.0.0.1/a", "audio", "x")
        fetcher.close()
        return fetcher.times

    times = asyncio.run(run())
    assert times.num_items == {"image": 1, "audio": 1}
    assert times.total_seconds == sum(times.seconds.values()) > 0


def test_data_urls_are_decoded_without_a_network():
    fetcher = make_fetcher(["other.test"])
    small, large = " data:,abc\n", "data:," + "x" * 2**21
    assert asyncio.run(fetcher.fetch(small, "image", "m")) == b"abc"
    assert fetcher.fetch_sync(large, "image", "m") == b"x" * 2**21
    assert "must have at most 2 bytes" in refusal(make_fetcher(max_bytes=2), small)


def test_files_need_a_folder(tmp_path):
    (tmp_path / "a").write_bytes(b"pixels")
    url = f"file://{tmp_path}/a"
    assert "--allowed-local-media-path names a folder" in refusal(make_fetcher(), url)
    fetcher = make_fetcher(folder=str(tmp_path))
    assert asyncio.run(fetcher.fetch(url, "image", "m")) == b"pixels"
    assert "not in the folder" in refusal(fetcher, "file:///etc/passwd")
    assert refusal(fetcher, f"{url}b").endswith("': No such file or directory")
    with pytest.raises(ConfigError, match=r"--allowed-local-media-path '.*/a' is not a folder"):
        make_fetcher(folder=str(tmp_path / "a"))


def test_a_name_that_is_not_known_is_told():
    assert "cannot be resolved" in refusal(make_fetcher(), "http://does-not-exist.invalid/")


# ---- redirects ----------------------------------------------------------------------------------


def redirect(location, status=302):
    return f"HTTP/1.1 {status} Found\r\nLocation: {location}\r\nContent-Length: 0\r\n\r\n".encode()


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_redirects_are_followed(status):
    found, requests = serve_and_fetch(
        [redirect("../b.png?c=d", status), OK + b"Content-Length: 2\r\n\r\nab"], "/x/y/a.png"
    )
    assert found == b"ab"
    assert [request.split()[1] for request in requests] == ["/x/y/a.png", "/x/b.png?c=d"]


@pytest.mark.parametrize(
    ("location", "message"),
    [
        ("http://127.0.0.1/", "--allowed-media-domains does not name it"),
        ("//localhost/", "--allowed-media-domains does not name it"),
        ("http://2130706433/", "IP address must be"),
        ("file:///etc/passwd", "a URL that does not begin with http: or https:"),
        ("data:,abc", "a URL that does not begin with http: or https:"),
        ("http://a@pictures.test/", "a user name"),
        ("http://[", "Invalid IPv6"),
    ],
)
def test_a_redirect_is_checked_like_a_url(location, message):
    with pytest.raises(RequestError, match=re.escape(message)):
        serve_and_fetch([redirect(location)])


def test_a_redirect_to_a_private_address_is_refused_although_the_first_host_was_public(
    monkeypatch,
):
    asked = []

    async def get(target, addresses, max_bytes, budget):
        asked.append(addresses)
        return Answer(status=302, headers={"location": f"http://{NAME}/again"})

    monkeypatch.setattr(fetch_module, "get", get)
    resolver = Resolver(pictures_test=[[PUBLIC], [PRIVATE]])
    text = refusal(make_fetcher(resolve=resolver), f"http://{NAME}/a")
    assert "not on the public internet" in text
    assert asked == [[PUBLIC]]


def test_redirects_are_limited_and_can_be_switched_off():
    with pytest.raises(RequestError, match="redirects more than 2 times"):
        serve_and_fetch([redirect("/a")] * 4, max_redirects=2)
    with pytest.raises(RequestError, match="redirects are not followed"):
        serve_and_fetch([redirect("/a")], max_redirects=0)


# ---- responses -----------------------------------------------------------------------------------


def chunked(*parts):
    body = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts)
    return OK + b"Transfer-Encoding: chunked\r\n\r\n" + body


@pytest.mark.parametrize(
    ("answer", "body"),
    [
        (OK + b"Content-Length: 3\r\n\r\nabc", b"abc"),
        (OK + b"Content-Length: 3\r\n\r\nabcdef", b"abc"),
        (OK + b"Content-Length: 1\r\n\r\naHTTP/1.1 404 No\r\n\r\n", b"a"),
        (OK + b"Content-Length: 0\r\n\r\n", b""),
        (OK + b"\r\nabc", b"abc"),  # without a length, the body lasts until the connection ends
        (chunked(b"ab", b"c", b""), b"abc"),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + OK + b"Content-Length: 1\r\n\r\na", b"a"),
        (b"HTTP/1.1 103 Early\r\nContent-Length: 9\r\n\r\n" + OK + b"\r\na", b"a"),
        (OK + b"Content-Encoding: identity\r\n\r\na", b"a"),
    ],
)
def test_answers_of_every_form_are_read(answer, body):
    found, [request] = serve_and_fetch([answer], max_bytes=3)
    assert found == body
    assert request.startswith("GET /a.png HTTP/1.1\r\nHost: pictures.test:")
    assert "\r\nAccept-Encoding: identity\r\n" in request


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (OK + b"Content-Length: 4\r\n\r\n", "at most 3 bytes, and has more"),
        (OK + b"Content-Length: 999999999999999999999999999999999\r\n\r\n", "at most 3|valid HTTP"),
        (OK + b"Content-Length: -1\r\n\r\n", "not valid HTTP"),
        (OK + b"\r\nabcd", "at most 3 bytes"),
        (chunked(b"ab", b"cd"), "at most 3 bytes"),
        (OK + b"Content-Length: 3\r\n\r\nab", "ended before the answer was complete"),
        (chunked(b"ab"), "ended before the answer was complete"),
        (OK + b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n", "not valid HTTP"),
        (OK + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n", "not valid HTTP"),
        (OK + b"Content-Encoding: gzip\r\n\r\nabc", "compressed"),
        (OK + b"X: " + b"x" * 2**17, "has more than 65536 bytes"),
        (b"", "ended before the answer was complete"),
        (OK, "ended before the answer was complete"),
        (b"SSH-2.0-OpenSSH\r\n", "not valid HTTP"),
        (b"HTTP/1.1 101 Switching\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n", "HTTP|complete"),
        (b"HTTP/1.1 404 Not Found\r\n\r\nsecret", "status of the answer must be 200, got 404"),
        (b"HTTP/1.1 206 Partial\r\n\r\nab", "must be 200, got 206"),
        (b"HTTP/1.1 302 Found\r\n\r\n", "must be 200, got 302"),
    ],
)
def test_other_answers_are_refused(answer, message):
    with pytest.raises(RequestError, match=message) as error:
        serve_and_fetch([answer], max_bytes=3)
    assert "secret" not in str(error.value)


async def _trickle(writer, part):
    writer.write(OK)
    while True:
        writer.write(part)
        await writer.drain()
        await asyncio.sleep(0.001)


async def trickle_head(writer):
    await _trickle(writer, b"X: y\r\n")


async def trickle_body(writer):
    writer.write(OK + b"\r\n")
    await _trickle(writer, b"x")


async def say_nothing(writer):
    await asyncio.sleep(LONG_S)


@pytest.mark.parametrize("answer", [trickle_head, trickle_body, say_nothing])
def test_the_whole_time_is_limited(answer):
    with pytest.raises(RequestError, match=r"it took longer than the limit of 0\.05 s"):
        serve_and_fetch([answer], timeout_s=0.05)


def test_the_time_to_resolve_a_name_is_limited():
    async def never(host, port):
        await asyncio.Event().wait()

    fetcher = make_fetcher(timeout_s=0.01, resolve=never)
    assert "took longer than the limit of 0.01 s" in refusal(fetcher, f"http://{NAME}/a")


@pytest.mark.parametrize("error", [None, ConnectionRefusedError])
def test_the_next_address_is_tried(monkeypatch, error):
    connect = asyncio.open_connection

    async def open_connection(address, **options):
        if address == "127.0.0.2":
            if error:
                raise error
            await asyncio.Event().wait()
        return await connect(address, **options)

    monkeypatch.setattr(asyncio, "open_connection", open_connection)
    monkeypatch.setattr(http_get, "CONNECT_S", 0.01)

    async def run():
        fetcher = make_fetcher([NAME], resolve=Resolver(pictures_test=[["127.0.0.2", "127.0.0.1"]]))
        async with serving([OK + b"\r\nab"]) as (port, _):
            return await fetcher.fetch(f"http://{NAME}:{port}/", "image", "m")

    assert asyncio.run(run()) == b"ab"


def test_an_address_where_nobody_listens_is_not_told():
    with socket.socket() as bound:  # a bound port on which nobody listens
        bound.bind(("127.0.0.1", 0))
        url = f"http://{NAME}:{bound.getsockname()[1]}/"
        text = refusal(make_fetcher([NAME], resolve=local), url)
    assert text == f"m[0]: cannot fetch {url!r}: Connection refused"


def test_proxies_of_the_environment_are_not_used(monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    assert serve_and_fetch([OK + b"\r\nab"])[0] == b"ab"


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """Make a folder with cert.pem, for the host name of these tests, and its key.pem."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the program openssl")
    folder = tmp_path_factory.mktemp("tls")
    command = (
        *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
        *("-nodes", "-days", "2", "-subj", "/CN=x", "-addext", f"subjectAltName=DNS:{NAME}"),
        *("-keyout", "key.pem", "-out", "cert.pem"),
    )
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return folder


def test_the_certificate_must_be_that_of_the_name(certificate, monkeypatch):
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(certificate / "cert.pem", certificate / "key.pem")
    answer = [OK + b"Content-Length: 2\r\n\r\nab"]
    with pytest.raises(RequestError, match="its certificate is not accepted: self"):
        serve_and_fetch(answer, tls=server)
    trusting = ssl.create_default_context(cafile=certificate / "cert.pem")
    monkeypatch.setattr(http_get, "tls_settings", lambda: trusting)
    assert serve_and_fetch(answer, tls=server)[0] == b"ab"
    with pytest.raises(RequestError, match=r"certificate is not valid for 'other\.test'"):
        serve_and_fetch(answer, name="other.test", tls=server)


def test_nothing_stays_open():
    serve_and_fetch([OK + b"\r\nab"])
    before = len(os.listdir("/proc/self/fd"))
    for answer in (OK + b"\r\nab", OK + b"Content-Length: 9\r\n\r\n", chunked(b"abcdef")):
        with contextlib.suppress(RequestError):
            serve_and_fetch([answer], max_bytes=3)
    assert len(os.listdir("/proc/self/fd")) <= before


def test_all_files_of_a_request_have_a_limit_together(monkeypatch, tmp_path):
    monkeypatch.setattr(fetch_module, "MAX_REQUEST_BYTES", 10)
    (tmp_path / "a").write_bytes(b"pixels")

    async def run():
        fetcher = make_fetcher([NAME], folder=str(tmp_path), resolve=local)
        budget = fetcher.make_budget()
        head = OK + b"Content-Length: 6\r\n\r\n"
        async with serving([head + b"pixels"] * 2) as (port, _):
            for url in (f"http://{NAME}:{port}/", f"file://{tmp_path}/a"):
                assert await fetcher.fetch(url, "image", "m") == b"pixels"
            await fetcher.fetch("data:,abcdefghijkl", "image", "m", budget)
            await fetcher.fetch(f"http://{NAME}:{port}/", "image", "m", budget)
        return fetcher, budget

    fetcher, budget = asyncio.run(run())
    assert "have more than 10 bytes in total" in refusal(fetcher, f"file://{tmp_path}/a", budget)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://a.example/b?c=d@e", "http://a.example/b?c=d@e"),
        ("https://me:secret@a.example/b", "https://...@a.example/b"),
        ("http://me:" + "s" * 300 + "@a.example/b", "http://...@a.example/b..."),
    ],
)
def test_messages_show_a_url_without_user_name_and_password(url, shown):
    assert show_url(url) == shown
