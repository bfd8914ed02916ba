"""Wait for a server, and show what it does meanwhile. Needs only the standard library."""

import argparse
import json
import time
import urllib.error
import urllib.request


def read_state(url: str) -> dict[str, object] | None:
    """Return the answer of /readyz, or None while no server listens."""
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        return json.load(error)
    except OSError:
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://localhost:8000/v1")
    parser.add_argument("--api-key", default="none", help="not needed for the health routes")
    parser.add_argument("--timeout", type=float, default=600, help="seconds")
    args = parser.parse_args()
    end = time.monotonic() + args.timeout
    shown = None
    while time.monotonic() < end:
        state = read_state(args.url.removesuffix("/v1") + "/readyz")
        if state != shown:
            print(state if state is not None else "nobody listens yet")
            shown = state
        if state is not None and state["status"] == "ready":
            return
        time.sleep(0.2)
    raise SystemExit("the server is not ready")


if __name__ == "__main__":
    main()
