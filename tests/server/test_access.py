"""Who may ask for what: keys and their scopes, origins, request ids, limits; and tokenizing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from splash.core.errors import ConfigError
from splash.server.auth import ApiKey, read_keys

COMPLETION = {"prompt": "hello", "max_tokens": 1}


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_keys_have_scopes(serve: Callable[..., Any]) -> None:
    served = serve(api_keys=(ApiKey("one"), ApiKey("two"), ApiKey("boss", admin=True)))
    for key, changes in (("one", 403), ("two", 403), ("boss", 200)):
        assert served.http.post("/v1/completions", json=COMPLETION, headers=bearer(key)).status_code == 200
        assert served.http.get("/layout", headers=bearer(key)).status_code == 200
        response = served.http.post("/layout", json={"layout": "dp"}, headers=bearer(key))
        assert response.status_code == changes
        expected = 404 if key == "boss" else 403
        assert served.http.delete("/layout/switch", headers=bearer(key)).status_code == expected
    refused = served.http.post("/layout", json={"layout": "dp"}, headers=bearer("one")).json()["error"]
    assert refused["code"] == "insufficient_scope"
    assert served.http.post("/v1/completions", json=COMPLETION, headers=bearer("three")).status_code == 401


def test_keys_come_from_options_files_and_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# team\nalpha\n\nbeta  admin\n", encoding="utf-8")
    environment = {"SPLASH_API_KEYS": "gamma, delta,", "SPLASH_ADMIN_KEYS": "root"}
    keys = read_keys("single", str(file), environment)
    assert {(key.secret, key.admin) for key in keys} == {
        ("single", True),
        ("alpha", False),
        ("beta", True),
        ("gamma", False),
        ("delta", False),
        ("root", True),
    }
    assert "alpha" not in repr(keys)
    assert read_keys(None, None, {}) == ()
    for content, message in (("a b\n", "line 1"), ("", "no keys"), ("a\nb user\n", "line 2")):
        file.write_text(content, encoding="utf-8")
        with pytest.raises(ConfigError, match=message) as refused:
            read_keys(None, str(file), {})
        assert refused.value.field == "api_key_file"
    with pytest.raises(ConfigError, match="cannot be read"):
        read_keys(None, str(tmp_path / "nowhere"), {})
    with pytest.raises(ConfigError, match="must not be empty"):
        read_keys("", None, {})


def test_request_ids_come_back(served: Any) -> None:
    for path in ("/health", "/v1/nothing"):
        assert served.http.get(path, headers={"x-request-id": "a-1.b:2"}).headers["x-request-id"] == "a-1.b:2"
    first, second = (served.http.get("/health").headers["x-request-id"] for _ in range(2))
    assert first != second
    bad = served.http.get("/health", headers={"x-request-id": "no good\t" + "x" * 200}).headers["x-request-id"]
    assert bad.isalnum()
    body = {**COMPLETION, "stream": True}
    assert served.http.post("/v1/completions", json=body, headers={"x-request-id": "s"}).headers["x-request-id"] == "s"


def test_ids_are_on_refusals_too(serve: Callable[..., Any]) -> None:
    served = serve(api_key="secret")
    response = served.http.get("/v1/models", headers={"x-request-id": "mine"})
    assert (response.status_code, response.headers["x-request-id"]) == (401, "mine")


def test_bodies_have_a_limit(serve: Callable[..., Any]) -> None:
    served = serve(max_body_bytes=1000)
    assert served.http.post("/v1/completions", json=COMPLETION).status_code == 200

    def chunks() -> Iterator[bytes]:
        for _ in range(100):
            yield b" " * 100

    for content in (b" " * 1001, chunks()):
        response = served.http.post("/v1/completions", content=content, headers={"content-type": "application/json"})
        assert response.status_code == 413
        assert response.json()["error"]["code"] == "body_too_large"
    assert not served.engine.running


def test_other_web_pages_get_nothing(serve: Callable[..., Any]) -> None:
    served = serve()
    own = served.url
    for origin, status in ((own, 200), ("https://evil.example", 403), ("null", 403), ("http://[", 403)):
        response = served.http.post("/v1/completions", json=COMPLETION, headers={"origin": origin})
        assert response.status_code == status
        assert "access-control-allow-origin" not in response.headers
    rebound = {"origin": "http://evil.example", "host": "evil.example"}
    assert served.http.post("/v1/completions", json=COMPLETION, headers=rebound).status_code == 403
    for name in ("localhost:1", "127.0.0.1:1", "[::1]:1"):
        headers = {"origin": f"http://{name}", "host": name}
        assert served.http.post("/v1/completions", json=COMPLETION, headers=headers).status_code == 200
    named = serve(api_key="secret")
    response = named.http.post("/v1/completions", json=COMPLETION, headers=rebound | bearer("secret"))
    assert response.status_code == 200
    preflight = {"origin": "https://evil.example", "access-control-request-method": "POST"}
    assert served.http.options("/v1/completions", headers=preflight).status_code == 405


def test_pages_that_are_named_may(serve: Callable[..., Any]) -> None:
    served = serve(cors_origins=("https://good.example",), api_key="secret")
    headers = {"origin": "https://good.example"}
    preflight = served.http.options(
        "/v1/completions",
        headers={**headers, "access-control-request-method": "POST", "access-control-request-headers": "authorization"},
    )
    assert preflight.status_code == 200
    response = served.http.post("/v1/completions", json=COMPLETION, headers=headers | bearer("secret"))
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == "https://good.example"
    headers = {"origin": "https://evil.example"} | bearer("secret")
    assert served.http.post("/v1/completions", json=COMPLETION, headers=headers).status_code == 403


def test_text_and_tokens_of_it(served: Any) -> None:
    tokenizer = served.engine.tokenizer
    text = "hello 👍🏽<|end|>"
    answer = served.http.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    assert answer["tokens"] == tokenizer.encode(text)
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == served.engine.max_model_len
    assert served.http.post("/detokenize", json={"tokens": answer["tokens"]}).json() == {"prompt": text}
    messages = [{"role": "user", "content": "hello"}]
    answer = served.http.post("/tokenize", json={"messages": messages}).json()
    assert answer["tokens"] == tokenizer.encode("<|user|>hello<|end|><|assistant|>")
    used = served.http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 1}).json()["usage"]
    assert used["prompt_tokens"] == answer["count"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "prompt"),
        ("/tokenize", {"messages": [{"role": "tool", "content": "a"}]}, "messages"),
        ("/tokenize", {"prompt": "a\ud800"}, "prompt"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [10**9]}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
    ],
)
def test_what_cannot_be_tokenized(served: Any, path: str, body: Any, param: str) -> None:
    import json

    response: httpx.Response = served.http.post(
        path, content=json.dumps(body), headers={"content-type": "application/json"}
    )
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
