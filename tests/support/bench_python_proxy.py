"""A plain Python proxy as many are written: FastAPI in front, httpx behind, round robin.

``python bench_python_proxy.py PORT URL...``: the thing to compare with, not to use.
"""

import itertools
import json
import sys
from collections.abc import AsyncIterator

import fastapi
import httpx
import uvicorn
from fastapi.responses import StreamingResponse


def make_app(urls: list[str]) -> fastapi.FastAPI:
    """The proxy's application."""
    app = fastapi.FastAPI()
    client = httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_connections=None))
    turns = itertools.cycle(urls)

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {}

    @app.post("/v1/chat/completions")
    async def completions(request: fastapi.Request) -> fastapi.Response:
        body = await request.body()
        json.loads(body)
        kept = {"content-type": request.headers.get("content-type", "application/json")}
        asked = client.build_request(
            "POST", next(turns) + "/v1/chat/completions", content=body, headers=kept
        )
        answer = await client.send(asked, stream=True)

        async def relay() -> AsyncIterator[bytes]:
            async for chunk in answer.aiter_bytes():
                yield chunk
            await answer.aclose()

        return StreamingResponse(
            relay(), status_code=answer.status_code, media_type=answer.headers["content-type"]
        )

    return app


if __name__ == "__main__":
    uvicorn.run(
        make_app(sys.argv[2:]),
        host="127.0.0.1",
        port=int(sys.argv[1]),
        log_level="error",
        access_log=False,
        loop="uvloop",
        backlog=4_096,
    )
