"""As much of curl as the pages' commands use, for machines that have none: `python tests/curl.py -s URL`."""

import argparse
import sys
import time
import urllib.error
import urllib.request

TRANSIENT = (408, 429, 500, 502, 503, 504)  # what curl's --retry tries again, says its manual
CANNOT_CONNECT = 7
REFUSED = 22


class Refused(Exception):
    """The answer to the last try is an error, which --fail does not print."""


def fetched(options: argparse.Namespace, last: bool) -> bytes | None:
    """The body of one try; None: try again. Raises: OSError: no connection; Refused."""
    headers = dict(header.split(": ", 1) for header in options.header)
    data = None if options.data is None else options.data.encode()
    request = urllib.request.Request(options.url, data, headers)
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request) as reply:
            body: bytes = reply.read()
            return body
    except urllib.error.HTTPError as error:
        if error.code in TRANSIENT and not last:
            return None
        if options.fail:
            raise Refused from None
        return error.read()
    except urllib.error.URLError as error:
        if options.retry_connrefused and isinstance(error.reason, ConnectionRefusedError) and not last:
            return None
        raise


def main() -> int:
    """Print the answer, as curl does."""
    parser = argparse.ArgumentParser(allow_abbrev=False)  # an option that is not here is an error
    parser.add_argument("-s", "--silent", action="store_true")
    parser.add_argument("-f", "--fail", action="store_true")
    parser.add_argument("-H", "--header", action="append", default=[])
    parser.add_argument("-d", "--data")
    parser.add_argument("--retry", type=int, default=0)
    parser.add_argument("--retry-delay", type=float, default=1.0)
    parser.add_argument("--retry-connrefused", action="store_true")
    parser.add_argument("url")
    options = parser.parse_args()
    if "://" not in options.url:
        options.url = f"http://{options.url}"
    for tries_left in range(options.retry, -1, -1):
        try:
            body = fetched(options, last=not tries_left)
        except OSError as error:
            print(error, file=sys.stderr)
            return CANNOT_CONNECT
        except Refused:
            return REFUSED
        if body is not None:
            sys.stdout.buffer.write(body)
            return 0
        time.sleep(options.retry_delay)
    raise AssertionError("the last try has an answer")


if __name__ == "__main__":
    sys.exit(main())
