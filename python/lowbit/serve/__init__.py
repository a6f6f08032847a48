"""``lowbit serve``: language models over HTTP, with OpenAI's interface. Needs starlette and uvicorn: ``lowbit[serve]``."""
