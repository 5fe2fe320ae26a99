"""The gateway: serves a verifier over HTTP, with OpenAI's API and vLLM's parameters, and with Anthropic's API.

It keeps no state and decides nothing about a text: each request becomes a generation of the SDK, whose events become
JSON. `settings` and `run` are the process; `app` has the routes and what wraps each of them; `upstream` is the client
side of the verifier. A request is an `exchange`. It goes through `bodies` (bytes to JSON), `parameters` (JSON to
checked values) and `asks` (values to options of the SDK), and runs in `outputs`. `completions`, `chat_completions`,
`responses` or `messages` write its answer, with the common parts of `answers`, and through `streams` if it is streamed.
A request of the last two becomes one for a chat first, in `response_asks` and `message_asks`, on `chats`; its reply is
written as `blocks`.
"""
