"""Published models of histories: attention over what a user has seen, recurrent ones, transformers, sessions as graphs."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.tables.torch_forms.form import (
    DIM,
    LENGTH,
    ROWS,
    Draw,
    embedding,
    everywhere,
    form,
    linear,
    masked_mean,
    mlp,
    own_length,
)

MOST = 12
"""Rows of the tables of positions."""


def history(draw: Draw) -> dict[str, torch.Tensor]:
    return {"hist": draw.history()}


def history_and_item(draw: Draw) -> dict[str, torch.Tensor]:
    return {"hist": draw.history(), "item": draw.keys()}


def not_empty(samples: int, length: int) -> bool:
    return length > 0


def not_one(samples: int, length: int) -> bool:
    """Attention is traced otherwise where there is one key."""
    return length != 1


@form(history_and_item, per_request=("hist",))
class DIN(nn.Module):
    """Attention of the target to the history; keys of 0 are masked."""

    def __init__(self) -> None:
        super().__init__()
        self.item = nn.Embedding(ROWS, DIM, padding_idx=0)
        self.attention = nn.Sequential(nn.Linear(4 * DIM, 16), nn.PReLU(), nn.Linear(16, 1))
        self.top = mlp(2 * DIM, 16, 1)

    def forward(self, hist: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
        keys, target = self.item(hist), self.item(item)
        query = target.unsqueeze(1).expand(-1, hist.shape[1], -1)
        scores = self.attention(torch.cat([query, keys, query - keys, query * keys], -1)).squeeze(-1)
        scores = torch.where(hist != 0, scores, torch.full_like(scores, -(2.0**32) + 1)).softmax(-1)
        pooled = torch.bmm(scores.unsqueeze(1), keys).squeeze(1)
        return torch.sigmoid(self.top(torch.cat([pooled, target], 1))).squeeze(1)


@form(lambda draw: {"log_seqs": draw.history()}, within=not_one, tolerance=3e-6)
class SASRec(nn.Module):
    """As pmixer's: positions times mask, causal attention, logits against the item table."""

    def __init__(self) -> None:
        super().__init__()
        self.item_emb = nn.Embedding(ROWS, DIM, padding_idx=0)
        self.pos_emb = nn.Embedding(MOST + 1, DIM, padding_idx=0)
        self.norms = nn.ModuleList([nn.LayerNorm(DIM, eps=1e-8) for _ in range(2)])
        self.layers = nn.ModuleList([nn.MultiheadAttention(DIM, 2, dropout=0.2) for _ in range(2)])
        self.last = nn.LayerNorm(DIM, eps=1e-8)

    def forward(self, log_seqs: torch.Tensor) -> torch.Tensor:
        seqs = self.item_emb(log_seqs) * self.item_emb.embedding_dim**0.5
        poss = torch.arange(1, log_seqs.shape[1] + 1, device=log_seqs.device).unsqueeze(0).repeat(log_seqs.shape[0], 1)
        seqs = seqs + self.pos_emb(poss * (log_seqs != 0))
        mask = ~torch.tril(torch.ones((seqs.shape[1], seqs.shape[1]), dtype=torch.bool))
        for norm, layer in zip(self.norms, self.layers, strict=True):
            seqs = torch.transpose(seqs, 0, 1)
            out, _ = layer(norm(seqs), seqs, seqs, attn_mask=mask)
            seqs = torch.transpose(seqs + out, 0, 1)
        return self.last(seqs)[:, -1] @ self.item_emb.weight.t()


@form(lambda draw: (draw.history(),), within=not_empty)
class BERT4Rec(nn.Module):
    """A mask token behind the history, positions by slice, an encoder of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(ROWS + 1, DIM, padding_idx=0), nn.Embedding(MOST, DIM)
        self.q, self.k, self.v = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.ff, self.norm, self.out = mlp(DIM, 16, DIM), nn.LayerNorm(DIM), nn.Linear(DIM, ROWS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.cat([x, torch.full((x.size(0), 1), ROWS, dtype=x.dtype)], 1)
        mask = (x > 0).unsqueeze(1).repeat(1, x.size(1), 1).unsqueeze(1)
        h = self.token(x) + self.position.weight.unsqueeze(0).repeat(x.size(0), 1, 1)[:, : x.size(1)]
        q, k, v = (part(h).view(x.size(0), -1, 2, DIM // 2).transpose(1, 2) for part in (self.q, self.k, self.v))
        scores = torch.matmul(q, k.transpose(-2, -1)) / (DIM // 2) ** 0.5
        h = h + torch.matmul(scores.masked_fill(mask == 0, -1e9).softmax(-1), v).transpose(1, 2).reshape(x.size(0), -1, DIM)
        return self.out(self.norm(h + self.ff(h)))[:, -1]


@form(lambda draw: {"hist": draw.history(), "item": draw.keys().clamp(min=1)}, within=not_empty)
class BehaviourTransformer(nn.Module):
    """BST: the target behind the history, learned positions, torch's encoder layer, padding masked."""

    def __init__(self) -> None:
        super().__init__()
        self.item, self.position = nn.Embedding(ROWS, DIM, padding_idx=0), nn.Parameter(torch.rand(MOST, DIM))
        self.layer = nn.TransformerEncoderLayer(DIM, 2, 16, dropout=0.1, batch_first=True)
        self.top = mlp(2 * DIM, 8, 1)

    def forward(self, hist: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
        x = torch.cat([hist, item.unsqueeze(1)], 1)
        h = self.layer(self.item(x) + self.position[: x.shape[1]], src_key_padding_mask=x == 0)
        mask = (x != 0).unsqueeze(-1)
        return torch.sigmoid(self.top(torch.cat([(h * mask).sum(1) / mask.sum(1).clamp(min=1), self.item(item)], 1))).squeeze(1)


@form(history, within=own_length)
class GRU4Rec(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.item, self.gru = nn.Embedding(ROWS, DIM, padding_idx=0), nn.GRU(DIM, 6, 1, batch_first=True)
        self.dense = nn.Linear(6, ROWS)

    def forward(self, hist: torch.Tensor) -> torch.Tensor:
        _, hidden = self.gru(self.item(hist))
        return self.dense(hidden[-1])


@form(lambda draw: {"hist": draw.history(), "length": draw.lengths().clamp(min=1)}, within=own_length)
class GRULastItem(nn.Module):
    """The output at each history's last item; `len` of an input counts samples."""

    def __init__(self) -> None:
        super().__init__()
        self.item, self.gru, self.fc = nn.Embedding(ROWS, DIM), nn.GRU(DIM, DIM, batch_first=True), nn.Linear(DIM, 1)

    def forward(self, hist: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
        out, _ = self.gru(self.item(hist))
        return self.fc(out[torch.arange(hist.size(0)), length - 1]).squeeze(1)


@form(history, within=own_length)
class BidirectionalLSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.item, self.lstm = nn.Embedding(ROWS, DIM), nn.LSTM(DIM, 4, 2, batch_first=True, bidirectional=True)
        self.fc = nn.Linear(8, 1)

    def forward(self, hist: torch.Tensor) -> torch.Tensor:
        out, (hidden, _) = self.lstm(self.item(hist))
        return self.fc(torch.cat([hidden[-1], hidden[-2]], 1) + out.mean(1)).squeeze(1)


@form(history, within=own_length)
class NARM(nn.Module):
    """A recurrent encoder, attention of its last state to all, bilinear logits; padded places are masked."""

    def __init__(self) -> None:
        super().__init__()
        self.item, self.gru = nn.Embedding(ROWS, DIM, padding_idx=0), nn.GRU(DIM, DIM, batch_first=True)
        self.a1, self.a2, self.v = (
            nn.Linear(DIM, DIM, bias=False),
            nn.Linear(DIM, DIM, bias=False),
            nn.Linear(DIM, 1, bias=False),
        )
        self.b = nn.Linear(DIM, 2 * DIM, bias=False)

    def forward(self, hist: torch.Tensor) -> torch.Tensor:
        out, hidden = self.gru(self.item(hist))
        last = hidden.permute(1, 0, 2)[:, -1]
        mask = torch.where(hist > 0, torch.tensor([1.0]), torch.tensor([0.0]))
        alpha = self.v(torch.sigmoid(self.a1(out) + mask.unsqueeze(2) * self.a2(last).unsqueeze(1))).squeeze(-1)
        local = (alpha.unsqueeze(2) * out * mask.unsqueeze(2)).sum(1)
        return torch.cat([local, last], 1) @ self.b(self.item.weight).t()


@form(history)
class STAMP(nn.Module):
    """The mean of a session and its last item attend to all; logits against the table."""

    def __init__(self) -> None:
        super().__init__()
        self.item = nn.Embedding(ROWS, DIM, padding_idx=0)
        self.w0, self.w1, self.w2, self.w3 = (nn.Linear(DIM, n) for n in (1, DIM, DIM, DIM))
        self.a, self.b = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, hist: torch.Tensor) -> torch.Tensor:
        x, mask = self.item(hist), (hist != 0).float().unsqueeze(-1)
        lengths = (hist != 0).sum(1)
        last = x.gather(1, (lengths - 1).clamp(min=0).view(-1, 1, 1).expand(-1, 1, DIM)).squeeze(1)
        mean = (x * mask).sum(1) / lengths.clamp(min=1).unsqueeze(1)
        weights = self.w0(torch.sigmoid(self.w1(x) + self.w2(last).unsqueeze(1) + self.w3(mean).unsqueeze(1))) * mask
        session = torch.tanh(self.a((weights * x).sum(1))) * torch.tanh(self.b(last))
        return session @ self.item.weight.transpose(0, 1)


@form(lambda draw: {"user": draw.keys(), "seq": draw.history(length=LENGTH), "item": draw.keys(draw.samples, 2)})
class Caser(nn.Module):
    """Horizontal and vertical convolutions over the last five items."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(ROWS, DIM), nn.Embedding(ROWS, DIM)
        self.vertical = nn.Conv2d(1, 2, (LENGTH, 1))
        self.horizontal = nn.ModuleList([nn.Conv2d(1, 3, (height, DIM)) for height in range(1, LENGTH + 1)])
        self.fc = nn.Linear(2 * DIM + 3 * LENGTH, DIM)
        self.w2, self.b2 = nn.Embedding(ROWS, 2 * DIM), nn.Embedding(ROWS, 1)

    def forward(self, user: torch.Tensor, seq: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
        image = self.item(seq).unsqueeze(1)
        across = []
        for convolution in self.horizontal:
            found = F.relu(convolution(image).squeeze(3))
            across.append(F.max_pool1d(found, found.size(2)).squeeze(2))
        z = F.relu(self.fc(torch.cat([self.vertical(image).view(-1, 2 * DIM), *across], 1)))
        x = torch.cat([z, self.user(user)], 1)
        return torch.baddbmm(self.b2(item), self.w2(item), x.unsqueeze(2)).squeeze(2)


@form(history, within=not_empty)
class NextItNet(nn.Module):
    """Dilated causal convolutions: padded in front, as long as the history."""

    def __init__(self) -> None:
        super().__init__()
        self.item = nn.Embedding(ROWS, DIM, padding_idx=0)
        self.layers = nn.ModuleList([nn.Conv1d(DIM, DIM, 3, dilation=d) for d in (1, 2)])
        self.out = nn.Linear(DIM, ROWS)

    def forward(self, hist: torch.Tensor) -> torch.Tensor:
        h = self.item(hist).transpose(1, 2)
        for layer, dilation in zip(self.layers, (1, 2), strict=True):
            h = h + F.relu(layer(F.pad(h, (2 * dilation, 0))))
        return self.out(h[:, :, -1])


@form(lambda draw: {"items": draw.keys(draw.samples, LENGTH), "times": draw.integers(0, 100, draw.samples, LENGTH).cumsum(1)})
class TiSASRec(nn.Module):
    """Keys of the intervals between all pairs of times, in a table of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.item, self.interval = nn.Embedding(ROWS, DIM), nn.Embedding(33, DIM)
        self.fc = nn.Linear(DIM, 1)

    def forward(self, items: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
        matrix = torch.clamp((times.unsqueeze(2) - times.unsqueeze(1)).abs() // 4, 0, 32)
        x, intervals = self.item(items), self.interval(matrix)
        scores = (x @ x.transpose(1, 2) + (intervals * x.unsqueeze(2)).sum(-1)) / DIM**0.5
        causal = torch.tril(torch.ones(LENGTH, LENGTH, dtype=torch.bool))
        return self.fc((scores.masked_fill(~causal, -1e9).softmax(-1) @ x)[:, -1]).squeeze(1)


@form(
    lambda draw: {"items": draw.history(), "times": draw.integers(1, 10**6, draw.samples, draw.length).cumsum(1)},
    within=not_one,
)
class HSTU(nn.Module):
    """Pointwise attention with a bias of the logarithm of the time between items, and one of their distance."""

    def __init__(self) -> None:
        super().__init__()
        self.item, self.item_scale = nn.Embedding(ROWS, DIM, padding_idx=0), DIM**0.5
        self.time, self.place = nn.Embedding(64, 1), nn.Parameter(torch.rand(2 * MOST))
        self.uvqk, self.out = nn.Linear(DIM, 4 * DIM, bias=False), nn.Linear(DIM, DIM)

    def forward(self, items: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
        n = items.shape[1]
        x = self.item(items) * self.item_scale
        u, v, q, k = F.silu(self.uvqk(x)).chunk(4, -1)
        apart = (times.unsqueeze(2) - times.unsqueeze(1)).abs().clamp(min=1)
        buckets = (torch.log(apart.float()) / 0.301).long().clamp(0, 63)
        places = self.place[torch.arange(n).unsqueeze(1) - torch.arange(n) + MOST]
        scores = F.silu(q @ k.transpose(1, 2) + self.time(buckets).squeeze(-1) + places) / max(n, 1)
        scores = scores * torch.tril(torch.ones(n, n)) * (items != 0).unsqueeze(1)
        return self.out(u * (scores @ v)).sum((1, 2))


@form(lambda draw: {"hist": draw.history(length=LENGTH)})
class FilterMLP(nn.Module):
    """FMLP-Rec: a learned filter in the frequencies of the history."""

    def __init__(self) -> None:
        super().__init__()
        self.item, self.filter = nn.Embedding(ROWS, DIM), nn.Parameter(torch.rand(1, LENGTH // 2 + 1, DIM, 2))
        self.fc = nn.Linear(DIM, 1)

    def forward(self, hist: torch.Tensor) -> torch.Tensor:
        x = torch.fft.rfft(self.item(hist), dim=1, norm="ortho") * torch.view_as_complex(self.filter)
        return self.fc(torch.fft.irfft(x, n=LENGTH, dim=1, norm="ortho")[:, -1]).squeeze(1)


@form(history_and_item, within=own_length, slow=True)
class DIEN(nn.Module):
    """Interests evolve: a cell is stepped over the history, its gate scaled by the attention."""

    def __init__(self) -> None:
        super().__init__()
        self.item, self.gru, self.cell = nn.Embedding(ROWS, DIM), nn.GRU(DIM, DIM, batch_first=True), nn.GRUCell(DIM, DIM)
        self.top = mlp(2 * DIM, 8, 1)

    def forward(self, hist: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
        states, _ = self.gru(self.item(hist))
        target = self.item(item)
        weights = torch.einsum("bld,bd->bl", states, target).masked_fill(hist == 0, -1e9).softmax(1)
        hidden = torch.zeros(hist.shape[0], DIM)
        for step in range(hist.shape[1]):
            w = weights[:, step : step + 1]
            hidden = (1 - w) * hidden + w * self.cell(states[:, step], hidden)
        return torch.sigmoid(self.top(torch.cat([hidden, target], 1))).squeeze(1)


@form(history_and_item)
class DeepInterestByTime(nn.Module):
    """SIM's first step: only items of the history with the target's category are attended to; categories are stored."""

    def __init__(self) -> None:
        super().__init__()
        self.item, self.fc = nn.Embedding(ROWS, DIM), nn.Linear(2 * DIM, 1)
        self.register_buffer("category", torch.arange(ROWS) % 5)

    def forward(self, hist: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
        same = (self.category[hist] == self.category[item].unsqueeze(1)) & (hist != 0)
        return self.fc(torch.cat([masked_mean(self.item(hist), same), self.item(item)], 1)).squeeze(1)


def session_graph(draw: Draw) -> dict[str, torch.Tensor]:
    nodes = draw.keys(draw.samples, 4)
    return {"items": nodes, "links": draw.floats(draw.samples, 4, 8), "alias": draw.integers(0, 4, draw.samples, LENGTH)}


@form(session_graph)
class SRGNN(nn.Module):
    """A session as a graph of its distinct items; `alias` says which node each click is."""

    def __init__(self) -> None:
        super().__init__()
        self.item, self.message = nn.Embedding(ROWS, DIM), nn.Linear(DIM, 2 * DIM)
        self.cell, self.one, self.two = nn.GRUCell(2 * DIM, DIM), nn.Linear(DIM, DIM), nn.Linear(DIM, 1, bias=False)

    def forward(self, items: torch.Tensor, links: torch.Tensor, alias: torch.Tensor) -> torch.Tensor:
        hidden = self.item(items)
        incoming, outgoing = self.message(hidden).chunk(2, -1)
        seen = torch.cat([links[:, :, :4] @ incoming, links[:, :, 4:] @ outgoing], 2)
        hidden = self.cell(seen.flatten(0, 1), hidden.flatten(0, 1)).view_as(hidden)
        clicked = hidden[torch.arange(items.size(0)).unsqueeze(1), alias]
        weights = self.two(torch.sigmoid(self.one(clicked) + clicked[:, -1:]))
        return (weights * clicked).sum(1) @ self.item.weight.t()


@form(history, tolerance=3e-6)
class ComiRec(nn.Module):
    """Several interests by self-attention; an all-padded history has none."""

    def __init__(self) -> None:
        super().__init__()
        self.item, self.w1, self.w2 = nn.Embedding(ROWS, DIM, padding_idx=0), nn.Linear(DIM, 16), nn.Linear(16, 3)

    def forward(self, hist: torch.Tensor) -> torch.Tensor:
        x = self.item(hist)
        scores = self.w2(torch.tanh(self.w1(x))).transpose(1, 2)
        scores = torch.where((hist == 0).unsqueeze(1), torch.full_like(scores, -(2.0**31)), scores).softmax(-1)
        return (scores @ x @ self.item.weight.t()).amax(1)


@form(lambda draw: {"hist": draw.history(length=LENGTH)}, slow=True)
class CapsuleRouting(nn.Module):
    """MIND: three rounds of routing from stored logits."""

    def __init__(self) -> None:
        super().__init__()
        self.item, self.s = nn.Embedding(ROWS, DIM), nn.Linear(DIM, DIM, bias=False)
        self.register_buffer("b", torch.randn(1, 2, LENGTH))

    def forward(self, hist: torch.Tensor) -> torch.Tensor:
        x, mask = self.s(self.item(hist)), (hist != 0).unsqueeze(1)
        b = self.b.repeat(hist.size(0), 1, 1)
        for _ in range(3):
            w = b.masked_fill(~mask, -1e9).softmax(1) * mask
            z = w @ x
            length = (z**2).sum(-1, keepdim=True)
            capsules = length / (1 + length) / (length + 1e-9).sqrt() * z
            b = b + capsules @ x.transpose(1, 2)
        return capsules.amax(1).sum(1)


@form(
    lambda draw: {"item": draw.keys(), "short": draw.history(), "long": draw.history(length=2 * draw.length + 1)},
    e=embedding(padding_idx=0),
    fc=linear(3 * DIM),
)
def two_histories(self: Any, item: torch.Tensor, short: torch.Tensor, long: torch.Tensor) -> torch.Tensor:
    """Histories of different lengths in one table."""
    parts = [self.e(item), masked_mean(self.e(short), short != 0), self.e(long).amax(1)]
    return self.fc(torch.cat(parts, 1)).squeeze(1)


@form(
    lambda draw: {"items": draw.history(), "actions": draw.keys(draw.samples, draw.length, rows=4)},
    item=embedding(),
    action=embedding(4),
    position=embedding(MOST),
    fc=linear(),
)
def position_by_cumulative_sum(self: Any, items: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
    """Positions count the items that are no padding, so they depend on keys."""
    mask = (items != 0).long()
    places = torch.cumsum(mask, 1) * mask
    return self.fc((self.item(items) + self.action(actions) + self.position(places)).sum(1)).squeeze(1)


@form(history, within=own_length, e=embedding(), weights=torch.linspace(0, 1, LENGTH), fc=linear())
def weights_of_own_length(self: Any, hist: torch.Tensor) -> torch.Tensor:
    return self.fc(torch.einsum("bld,l->bd", self.e(hist), self.weights)).squeeze(1)


@form(history, within=everywhere, e=embedding(), fc=linear())
def recency(self: Any, hist: torch.Tensor) -> torch.Tensor:
    """Weights that decay with the distance from the end."""
    weights = 0.9 ** torch.arange(hist.shape[1] - 1, -1, -1)
    return self.fc((self.e(hist) * weights.view(1, -1, 1)).sum(1)).squeeze(1)
