"""The HTTP server of `amusd serve`: OpenAI's protocol over an engine (docs/serving.md).

`requests` reads what a client asks for and `responses` writes what it gets; both are pure. `app` has the routes, the
queue and the clients that go away, `metrics` what Prometheus reads, `server` the socket and the signals.
"""
