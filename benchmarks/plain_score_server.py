"""A plain FastAPI application around a torch module with its tables on the device: what people write without a server for it.

    python -m benchmarks.plain_score_server MODULE.pt DEVICE PORT

`POST /score` takes (n, tables) int64 keys, then (n, 13) float32 features, and answers (n,) float32 scores, all of them raw.
"""

import sys

import numpy as np
import torch
import uvicorn
from fastapi import FastAPI, Request, Response

from benchmarks.dlrm import FEATURES


def main() -> None:
    """Serve until a signal."""
    path, device, port = sys.argv[1], sys.argv[2], int(sys.argv[3])
    module = torch.load(path, weights_only=False).to(device).eval()
    tables = len(module.emb)
    app = FastAPI()

    @app.get("/v2/health/ready")
    async def ready() -> dict[str, bool]:
        return {"ready": True}

    @app.post("/score")
    async def score(request: Request) -> Response:
        body = await request.body()
        samples = len(body) // (8 * tables + 4 * FEATURES)
        keys = np.frombuffer(body, np.int64, samples * tables).reshape(samples, tables)
        dense = np.frombuffer(body, np.float32, samples * FEATURES, 8 * tables * samples).reshape(samples, FEATURES)
        with torch.inference_mode():
            scores = module(torch.tensor(dense, device=device), torch.tensor(keys, device=device))
        return Response(scores.cpu().numpy().tobytes(), media_type="application/octet-stream")

    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning", loop="uvloop", http="httptools")


if __name__ == "__main__":
    main()
