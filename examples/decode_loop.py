"""A minimal serving loop to start from: a paged cache, chunked prefill, then decoding, one CUDA graph for all steps.

python examples/decode_loop.py

The model is a small decoder with random weights; a step is append_kv, plan and one launch a layer.  Nothing in the
decoding loop waits for the GPU: the host plans the next step while this one runs.  Needs a Hopper GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import attncc

CAUSAL = Path(__file__).parent / "causal.attn"
LAYERS, WIDTH, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 4, 1024, 8, 2, 128, 4096
PAGE_SIZE, CHUNK = 16, 128  # rows of a page; rows of a prompt that one step takes

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]  # layer, q, k, v [rows, heads, HEAD_DIM] -> out, as q
Table = tuple[Tensor, Tensor, Tensor, Tensor]  # qo_indptr, kv_indptr, kv_indices, last_page_len


class Model:
    """RMSNorm, rotary attention and a gated MLP in every layer; what attends is given to each call."""

    def __init__(self, device: str, dtype: torch.dtype = torch.bfloat16, seed: int = 0):
        gen = torch.Generator(device).manual_seed(seed)

        def weight(rows: int, columns: int) -> Tensor:
            return (torch.randn(rows, columns, generator=gen, device=device) / columns**0.5).to(dtype)

        self.device, self.dtype = device, dtype
        self.embedding, self.head = weight(VOCABULARY, WIDTH) * WIDTH**0.5, weight(VOCABULARY, WIDTH)
        self.layers = [
            {
                # twice as large as usual: random heads that look at few keys, as trained ones do
                "qkv": 2 * weight((HEADS + 2 * KV_HEADS) * HEAD_DIM, WIDTH), "out": weight(WIDTH, HEADS * HEAD_DIM),
                "up": weight(4 * WIDTH, WIDTH), "down": weight(WIDTH, 2 * WIDTH),
            }
            for _ in range(LAYERS)
        ]  # fmt: skip

    def __call__(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Logits [rows, VOCABULARY], float32, of the rows of a batch one after another."""
        x = self.embedding[tokens]
        for n, layer in enumerate(self.layers):
            qkv = F.linear(F.rms_norm(x, (WIDTH,)), layer["qkv"]).view(len(x), -1, HEAD_DIM)
            q, k, v = qkv.split([HEADS, KV_HEADS, KV_HEADS], 1)
            x = x + F.linear(attend(n, rope(q, positions), rope(k, positions), v).flatten(1), layer["out"])
            up, gate = F.linear(F.rms_norm(x, (WIDTH,)), layer["up"]).chunk(2, -1)
            x = x + F.linear(up * F.silu(gate), layer["down"])
        return F.linear(F.rms_norm(x, (WIDTH,)), self.head).float()


def rope(x: Tensor, positions: Tensor, theta: float = 1e4) -> Tensor:
    """Rotary positions, halves of a head's features as pairs."""
    frequency = theta ** (-torch.arange(0, HEAD_DIM, 2, device=x.device) / HEAD_DIM)
    angle = (positions[:, None] * frequency)[:, None]
    a, b = x.float().chunk(2, -1)
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1).to(x.dtype)


class PagedCache:
    """Keys and values of every layer, and which pages each request has."""

    def __init__(self, model: Model, batch: int, num_pages: int):
        shape = (num_pages, PAGE_SIZE, KV_HEADS, HEAD_DIM)
        options: dict[str, Any] = {"dtype": model.dtype, "device": model.device}
        self.layers = [(torch.zeros(shape, **options), torch.zeros(shape, **options)) for _ in range(LAYERS)]
        self.free = torch.randperm(num_pages).tolist()
        self.pages: list[list[int]] = [[] for _ in range(batch)]
        self.lengths = [0] * batch

    def extend(self, new_rows: list[int]) -> Table:
        """Make room for so many new rows of each request: the table (on the host) as it is with them."""
        for b, n in enumerate(new_rows):
            self.lengths[b] += n
            while len(self.pages[b]) * PAGE_SIZE < self.lengths[b]:
                self.pages[b].append(self.free.pop())
        last = [(n - 1) % PAGE_SIZE + 1 for n in self.lengths]
        ids = [page for pages in self.pages for page in pages]
        lists = (offsets(new_rows), offsets([len(pages) for pages in self.pages]), ids, last)
        qo_indptr, kv_indptr, kv_indices, last_page_len = (torch.tensor(x, dtype=torch.int32) for x in lists)
        return qo_indptr, kv_indptr, kv_indices, last_page_len


def offsets(counts: list[int]) -> list[int]:
    return [sum(counts[:n]) for n in range(len(counts) + 1)]


class Server:
    """A fixed batch of requests.  `attention` is an attncc.BatchAttention with room for CHUNK rows of each."""

    def __init__(self, model: Model, cache: PagedCache, attention: Any):
        self.model, self.cache, self.attention = model, cache, attention
        batch = len(cache.pages)
        # The table on the device, at one place for ever: the captured append_kv reads it there.
        sizes = (batch + 1, batch + 1, len(cache.free), batch)
        self.table = [torch.zeros(n, dtype=torch.int32, device=model.device) for n in sizes]

    def plan(self, new_rows: list[int]) -> None:
        """What a step needs before its first layer."""
        table = self.cache.extend(new_rows)
        self.attention.plan(*table)
        for there, here in zip(self.table, table, strict=True):
            here = here.pin_memory() if there.is_cuda else here  # so that the copy waits for nothing
            there[: len(here)].copy_(here, non_blocking=True)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        attncc.append_kv(k, v, self.cache.layers[layer], *self.table)
        return self.attention.run(q, self.cache.layers[layer])

    def prefill(self, prompts: list[list[int]]) -> Tensor:
        """The first token after each prompt [batch]; a step takes up to CHUNK rows of every prompt."""
        first = torch.zeros(len(prompts), dtype=torch.int64, device=self.model.device)
        for start in range(0, max(map(len, prompts)), CHUNK):
            chunks = [prompt[start : start + CHUNK] for prompt in prompts]
            self.plan([len(chunk) for chunk in chunks])
            tokens = torch.tensor([t for chunk in chunks for t in chunk], device=self.model.device)
            positions = torch.cat([torch.arange(start, start + len(chunk)) for chunk in chunks]).to(tokens.device)
            logits = self.model(tokens, positions, self.attend)
            ends = offsets([len(chunk) for chunk in chunks])[1:]
            for b, prompt in enumerate(prompts):
                if start < len(prompt) <= start + CHUNK:
                    first[b] = logits[ends[b] - 1].argmax()
        return first

    def decode(self, first: Tensor, steps: int) -> tuple[Tensor, float]:
        """(tokens [steps, batch] that follow `first`, seconds for all steps but the first)."""
        tokens = first.clone()
        positions = torch.tensor(self.cache.lengths, device=tokens.device)

        def step() -> None:
            tokens.copy_(self.model(tokens, positions, self.attend).argmax(-1))
            positions.add_(1)

        run, history, begun = step, [], 0.0
        for n in range(steps):
            self.plan([1] * len(tokens))
            if n == 0 and tokens.is_cuda:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    step()
                run = graph.replay
            run()
            history.append(tokens.clone())
            if n == 0:
                synchronize(tokens)
                begun = time.perf_counter()
        synchronize(tokens)
        return torch.stack(history), time.perf_counter() - begun


def synchronize(t: Tensor) -> None:
    if t.is_cuda:
        torch.cuda.synchronize(t.device)


def surprise(model: Model, prompt: list[int], generated: list[int]) -> float:
    """How far below the best logit a generated token's is at most, in standard deviations of logits, when the whole
    text goes through the model at once, without a cache: 0 but for ties within rounding."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1).float() for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(0, 1).to(model.dtype)

    text = torch.tensor(prompt + generated[:-1], device=model.device)
    logits = model(text, torch.arange(len(text), device=model.device), attend)[len(prompt) - 1 :]
    chosen = logits.gather(1, torch.tensor(generated, device=model.device)[:, None])[:, 0]
    return float(((logits.amax(-1) - chosen) / logits.std(-1)).max())


@torch.inference_mode()
def main(batch: int = 16, steps: int = 200) -> None:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        print("decode_loop: needs a Hopper GPU (sm_90) that torch can use, and found none; nothing was run")
        return
    model = Model("cuda")
    lengths = torch.randint(1, 1000, (batch,)).tolist()
    prompts = [torch.randint(VOCABULARY, (n,)).tolist() for n in lengths]
    num_pages = sum(-(-(n + steps) // PAGE_SIZE) for n in lengths)
    kernel = attncc.compile(CAUSAL, variant="causal", head_dim=HEAD_DIM, layout="paged", page_size=PAGE_SIZE)
    attention = attncc.BatchAttention(
        kernel, num_qo_heads=HEADS, num_kv_heads=KV_HEADS, page_size=PAGE_SIZE,
        max_batch_size=batch, max_qo_rows=batch * CHUNK, max_kv_pages=num_pages,
    )  # fmt: skip
    server = Server(model, PagedCache(model, batch, num_pages), attention)

    first = server.prefill(prompts)
    following, seconds = server.decode(first, steps)
    tokens = torch.cat([first[None], following]).T.tolist()
    print(f"prefill: {sum(lengths)} rows of {batch} prompts, {CHUNK} of each in a step")
    each = seconds / (steps - 1)
    print(f"decode: {steps} steps, {batch / each:,.0f} tokens/s, {each * 1e3:.2f} ms a step")

    worst = max(surprise(model, prompt, generated) for prompt, generated in zip(prompts, tokens, strict=True))
    print(f"largest distance from the best logit of a forward without a cache: {worst:.3f} standard deviations")
    if not worst < 0.2:
        raise SystemExit("decode_loop: the tokens are not those of the model without a cache")


if __name__ == "__main__":
    main()
