# SPDX-License-Identifier: Apache-2.0
"""What an operator's command says of a server that does not respond, or is not what was expected. Pure."""

from __future__ import annotations

import aiohttp
import msgspec

from kvferry.common.exceptions import NOT_JSON, system_reason

MAX_SHOWN_CHARS = 200


def why_no_response(error: aiohttp.ClientError | TimeoutError | OSError) -> str:
    """Return why there is no response, in the system's words and not the client library's."""
    match error:
        case TimeoutError():
            return "no response in time"
        case aiohttp.ClientConnectorCertificateError():
            return f"its certificate is not trusted: {error.certificate_error}"
        case aiohttp.ClientConnectorSSLError():
            return "it does not serve https"
        case aiohttp.ClientConnectorError():
            return system_reason(error.os_error)
        case OSError():
            return system_reason(error)
        case aiohttp.ServerDisconnectedError():
            return "it closed the connection; does it serve https?"
        case aiohttp.ClientPayloadError():
            return "its answer breaks off"
        case _:
            return "what it sends is not HTTP"


def refusal(url: str, status: int, page: bytes | bytearray, *, server: str, key_option: str = "--key") -> str:
    """Return in one line what a response says that is no success.

    Args:
        server: What the server at the URL should be, as "a kvferry proxy".
        key_option: The option that names the key that it needs.
    """
    try:
        message = one_line(msgspec.json.decode(page, type=_Failed).error.message)
    except NOT_JSON:
        what = f"answered {status} with {describe_page(page)}"
        return f"{url} is not {server}: it {what}" if status < 500 else f"{url} {what}"
    hint = {401: f"; {key_option} names the file with its key", 404: f"; is it {server}?"}.get(status, "")
    return f"{url} answered {status}: {message}{hint}"


def describe_page(page: bytes | bytearray) -> str:
    """Return what a page is that was not expected, in a few words."""
    text = one_line(page[: 4 * MAX_SHOWN_CHARS].decode(errors="replace"))
    return "an HTML page" if text.startswith("<") else repr(text) if text else "an empty page"


def one_line(text: str) -> str:
    """Return the beginning of a text, in one line."""
    return " ".join(text.split())[:MAX_SHOWN_CHARS]


class _Error(msgspec.Struct, frozen=True):
    message: str


class _Failed(msgspec.Struct, frozen=True):
    """An error in OpenAI's shape."""

    error: _Error
