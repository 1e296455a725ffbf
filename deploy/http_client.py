# SPDX-License-Identifier: Apache-2.0
"""The HTTP client of operators' commands: a proxy's list of agents, and what is said of a server that does
not respond or is not what was expected.
"""

from __future__ import annotations

import ssl

import aiohttp
import msgspec

from kvferry.common.exceptions import NOT_JSON, system_reason
from kvferry.common.json_errors import explain
from kvferry.proxy.api.openapi import NodeList

CALL_TIMEOUT_S = 5.0
MAX_PAGE_BYTES = 16 << 20
"""A thousand agents take about half a megabyte."""
MAX_SHOWN_CHARS = 200


class StatusFailed(RuntimeError):
    """The proxy's list of agents cannot be had; the message says why."""


def client_session(
    tls: ssl.SSLContext | None, bearer: str | None, timeout_s: float = CALL_TIMEOUT_S
) -> aiohttp.ClientSession:
    """Open the HTTP client of an operator's command. `bearer`: the key or token it sends, `tls`: whom it
    trusts; the system's authorities if None.
    """
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(ssl=True if tls is None else tls),
        timeout=aiohttp.ClientTimeout(total=timeout_s),
        headers={} if bearer is None else {"Authorization": f"Bearer {bearer}"},
        trust_env=False,
    )


async def fetch_nodes(http: aiohttp.ClientSession, url: str) -> NodeList:
    """Return a proxy's list of agents. Raises `StatusFailed`."""
    try:
        async with http.get(f"{url}/nodes") as response:
            page = await read_page(response, StatusFailed, MAX_PAGE_BYTES)
            if response.status != 200:
                raise StatusFailed(refusal(url, response.status, page, server="a kvferry proxy"))
        return msgspec.json.decode(page, type=NodeList)
    except (aiohttp.ClientError, TimeoutError) as error:
        raise StatusFailed(f"{url} cannot be reached: {why_no_response(error)}") from error
    except msgspec.ValidationError as error:
        why = explain(error, whole="its list of agents").message
        raise StatusFailed(f"{url} is not a kvferry proxy of this version: {why}") from error
    except NOT_JSON as error:
        raise StatusFailed(f"{url} is not a kvferry proxy: it answered with {describe_page(page)}") from error


async def read_page(response: aiohttp.ClientResponse, failure: type[Exception], max_bytes: int) -> bytes:
    """Read a whole body. Raises `failure` if it is longer than `max_bytes`."""
    page = bytearray()
    async for part in response.content.iter_any():
        page += part
        if len(page) > max_bytes:
            raise failure(f"{response.url} answered with more than {max_bytes} bytes")
    return bytes(page)


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
