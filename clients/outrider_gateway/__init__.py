"""The gateway: serves a verifier over HTTP, with OpenAI's API and vLLM's parameters, and with Anthropic's API.

It keeps no state and decides nothing about a text: each request becomes a generation of the SDK, whose events become
JSON. `settings` and `run` are the process; `app` has the routes and what wraps each of them; `upstream` is the client
side of the verifier. A request is an `exchange`. It goes through `bodies` (bytes to JSON) and `parameters` (JSON to
checked values) to a dialect, which is one API: a file of `dialects` has its parameters, what they ask for, and how its
answers are written. The seam is `dialects.dialect`: a request becomes an `Ask` (`asks`), the ask becomes events of
texts (`outputs`, and `replies` where there are calls of tools), and the dialect writes these, through `streams` if the
answer is streamed. Responses and Messages become chats first (`dialects.as_chat`), and write their answers as blocks.
"""
