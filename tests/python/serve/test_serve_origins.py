"""`lowbit serve`: pages of other sites."""

import json

import pytest
from needs import need_packages

need_packages("starlette", "uvicorn", "llguidance", "anthropic", "openai")
from api_clients import USER, model  # noqa: F401
from lowbit.serve.routes import Limits
from served_models import Client, serving


def test_allowed_origins(model):
    with serving([model], Limits(hosts=("127.0.0.1",), origins=("https://a.example",))) as (port, _):
        client, site = Client(port), {"Origin": "https://a.example"}
        asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,x-api-key,x-b"}
        asks["Access-Control-Request-Private-Network"] = "true"
        status, headers, _ = client.send("/v1/messages", None, "OPTIONS", **site, **asks)
        assert (status, headers["access-control-allow-origin"]) == (200, "https://a.example")
        assert headers["access-control-allow-headers"] == asks["Access-Control-Request-Headers"]
        assert headers["access-control-allow-methods"] == "GET, POST, DELETE"
        body = {"messages": USER, "max_tokens": 3}
        for path, more in (
            ("/v1/chat/completions", {}),
            ("/v1/messages", {"stream": True}),
            ("/v1/messages", {"max_tokens": 0}),
        ):
            status, headers, _ = client.send(path, body | more, **site)
            assert headers["access-control-allow-origin"] == "https://a.example" and status == (
                400 if 0 in more.values() else 200
            )
        for origin in ("https://b.example", "http://a.example", "https://a.example.b", "null"):
            for path, method, more in (("/v1/chat/completions", "OPTIONS", asks), ("/tokenize", "POST", {})):
                status, headers, data = client.send(
                    path, {"content": "a"} if method == "POST" else None, method, Origin=origin, **more
                )
                assert status == 403 and "access-control-allow-origin" not in headers
                assert (
                    f"a page of {origin}; expected one of this server or https://a.example"
                    in json.loads(data)["error"]["message"]
                )
        status, _, data = client.send("/tokenize", None, "OPTIONS", **site, **{"Access-Control-Request-Method": "PATCH"})
        assert status == 405 and json.loads(data)["error"]["code"] == "method_not_allowed"
        assert client.send("/v1/models", Host="evil.example", **site)[0] == 403
    with serving([model], Limits(origins=("*",))) as (port, _):
        status, headers, _ = Client(port).send("/v1/models", Origin="https://b.example")
        assert (status, headers["access-control-allow-origin"]) == (200, "*")
    with serving([model], Limits()) as (port, _):
        status, headers, _ = Client(port).send("/v1/models", None, "OPTIONS", Origin="https://b.example", **asks)
        assert status == 405 and "access-control-allow-origin" not in headers


@pytest.mark.parametrize(
    ("given", "expected"),
    [("https://A.example", "https://a.example"), ("http://localhost:3000/", "http://localhost:3000"), ("*", "*"),
     ("a.example", None),
     ("https://a.example/path", None), ("ftp://a.example", None), ("https://", None), ("", None), ("null", None)],
)  # fmt: skip
def test_the_option_of_origins(given, expected):
    from lowbit.cli.serve import _origin

    if expected is not None:
        assert _origin(given) == expected
        return
    with pytest.raises(ValueError, match="--allowed-origin is .*; expected a site such as https://example.com, or \\*"):
        _origin(given)
