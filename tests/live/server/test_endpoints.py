"""Every endpoint answers, and as the engine does when it is called directly."""

from __future__ import annotations

from tests.live.server.conftest import Setting


def test_completions_stream_token_ids(server: Setting) -> None:
    client = server.client
    whole = client.post("/v1/completions", prompt=[1, 2, 3], max_tokens=8, temperature=0, return_token_ids=True)
    assert whole.status == 200, whole.body
    ids = whole.document["choices"][0]["token_ids"]
    print(whole.document)
    pieces = list(client.events("/v1/completions", prompt=[1, 2, 3], max_tokens=8, temperature=0, return_token_ids=True))
    assert [token for piece in pieces for token in piece["choices"][0]["token_ids"]] == ids
    print(client.post("/v1/chat/completions", messages=[{"role": "user", "content": "hi"}], max_tokens=5, logprobs=True, top_logprobs=2).document)
    for path, body in (("/v1/embeddings", {"input": "ab"}), ("/pooling", {"input": [3,4]}), ("/classify", {"input": "a"}), ("/score", {"text_1": "a", "text_2": ["a", "b"]}), ("/rerank", {"query": "a", "documents": ["c", "a"]}), ("/tokenize", {"prompt": "héé"}), ("/detokenize", {"tokens": [1, 2]}), ("/tokenize", {})):
        print(path, client.post(path, **body).body[:300])
    for path in ("/health", "/ping", "/version", "/v1/models", "/metrics"):
        print(client.get(path).body[:200])
    assert 0
