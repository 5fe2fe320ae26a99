"""The gateway: serves a verifier over HTTP, by OpenAI's API with vLLM's parameters, and by Anthropic's.

It keeps no state and decides nothing about a text: each request becomes a generation of the SDK, whose events become
JSON. `settings` and `run` are the process; `app` is the table of routes and what stands around each of them; `upstream`
is the verifier as seen from here. A request is an `exchange`; it goes through `bodies` (bytes to JSON), `parameters`
(JSON to checked values) and `asks` (values to options of the SDK), runs in `outputs`, and is told by `completions`,
`chat_completions`, `responses` or `messages`, with the parts of `answers` that all have, through `streams` where it is
streamed. A request of the last two becomes one for a chat first: in `response_asks` and `message_asks`, on `chats`;
and its reply is told as `blocks`.
"""
