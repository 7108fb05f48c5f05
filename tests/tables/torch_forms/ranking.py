"""Published rankers of features: DLRM, factorization machines, crosses, towers and experts."""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from tests.tables.torch_forms.form import DIM, ROWS, Draw, bag, embedding, form, linear, masked_mean, mlp

FIELDS = 3


def fields(draw: Draw) -> dict[str, torch.Tensor]:
    return {"x": draw.keys(draw.samples, FIELDS)}


def offsets_lists(draw: Draw) -> tuple[Any, ...]:
    """DLRM's own inputs: dense features, a list of offsets and a list of keys, one of each a table."""
    bags = [draw.bags() for _ in range(FIELDS)]
    return draw.floats(draw.samples, 4), [offsets for _, offsets in bags], [keys for keys, _ in bags]


class _DLRM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb_l = nn.ModuleList([nn.EmbeddingBag(ROWS, DIM, mode="sum") for _ in range(FIELDS)])
        self.bot, self.top = mlp(4, 16, DIM), mlp(DIM + 6, 16, 1)

    def interact(self, dense: torch.Tensor, vectors: list[torch.Tensor]) -> torch.Tensor:
        x = self.bot(dense)
        every = torch.stack([x, *vectors], 1)
        products = torch.bmm(every, every.transpose(1, 2))
        rows, columns = torch.tril_indices(FIELDS + 1, FIELDS + 1, -1)
        return torch.sigmoid(self.top(torch.cat([x, products[:, rows, columns]], 1)))


@form(lambda draw: (draw.floats(draw.samples, 4), draw.keys(draw.samples, FIELDS)))
class DLRM(_DLRM):
    def forward(self, dense: torch.Tensor, sparse: torch.Tensor) -> torch.Tensor:
        return self.interact(dense, [table(sparse[:, k : k + 1]) for k, table in enumerate(self.emb_l)])


@form(offsets_lists)
class DLRMLists(_DLRM):
    def forward(self, dense_x: torch.Tensor, lS_o: list[torch.Tensor], lS_i: list[torch.Tensor]) -> torch.Tensor:
        vectors = [self.emb_l[k](keys, offsets) for k, (offsets, keys) in enumerate(zip(lS_o, lS_i, strict=True))]
        return self.interact(dense_x, vectors)


def stacked_offsets(draw: Draw) -> tuple[Any, ...]:
    dense, offsets, keys = offsets_lists(draw)
    return dense, torch.stack(offsets), keys


@form(stacked_offsets, alone=True)  # the samples are the second dimension of an input
class DLRMStackedOffsets(_DLRM):
    def forward(self, dense_x: torch.Tensor, lS_o: torch.Tensor, lS_i: list[torch.Tensor]) -> torch.Tensor:
        return self.interact(dense_x, [self.emb_l[k](keys, lS_o[k]) for k, keys in enumerate(lS_i)])


@form(lambda draw: {"ids": draw.keys(draw.samples, FIELDS), "dense": draw.floats(draw.samples, 2)})
class DCNv2(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleDict({f"c{k}": nn.Embedding(ROWS, DIM) for k in range(FIELDS)})
        width = FIELDS * DIM + 2
        self.u = nn.ModuleList([nn.Linear(width, 4, bias=False) for _ in range(2)])
        self.v = nn.ModuleList([nn.Linear(4, width) for _ in range(2)])
        self.top = mlp(width, 16, 1)

    def forward(self, ids: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
        columns = [self.tables[f"c{k}"](column) for k, column in enumerate(ids.unbind(1))]
        x = first = torch.cat([*columns, dense], 1)
        for u, v in zip(self.u, self.v, strict=True):
            x = first * v(u(x)) + x
        return torch.sigmoid(self.top(x)).squeeze(1)


class FeaturesEmbedding(nn.Module):
    """pytorch-fm: one table for all fields; each field's keys are shifted by the rows of those before it."""

    def __init__(self, dims: tuple[int, ...] = (ROWS, 20, 30), width: int = DIM) -> None:
        super().__init__()
        self.embedding = nn.Embedding(sum(dims), width)
        self.offsets = np.array((0, *np.cumsum(dims)[:-1]), dtype=np.int64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.embedding(x + x.new_tensor(self.offsets).unsqueeze(0))


class FeaturesLinear(FeaturesEmbedding):
    def __init__(self) -> None:
        super().__init__(width=1)
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).sum(1) + self.bias


def field_columns(draw: Draw) -> dict[str, torch.Tensor]:
    return {"x": torch.stack([draw.keys(rows=rows) for rows in (ROWS, 20, 30)], 1)}


def pairwise(vectors: torch.Tensor) -> torch.Tensor:
    return 0.5 * (vectors.sum(1).pow(2) - vectors.pow(2).sum(1)).sum(1, keepdim=True)


@form(field_columns)
class FactorizationMachine(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.embedding = FeaturesLinear(), FeaturesEmbedding()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid((self.linear(x) + pairwise(self.embedding(x))).squeeze(1))


@form(field_columns)
class DeepFM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.embedding, self.mlp = FeaturesLinear(), FeaturesEmbedding(), mlp(FIELDS * DIM, 16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        vectors = self.embedding(x)
        return torch.sigmoid((self.linear(x) + pairwise(vectors) + self.mlp(vectors.view(-1, FIELDS * DIM))).squeeze(1))


@form(field_columns)
class FieldAwareFM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = FeaturesLinear()
        self.tables = nn.ModuleList([nn.Embedding(ROWS + 50, 4) for _ in range(FIELDS)])
        self.offsets = np.array((0, ROWS, ROWS + 20), dtype=np.int64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shifted = x + x.new_tensor(self.offsets).unsqueeze(0)
        each = [table(shifted) for table in self.tables]
        products = [each[j][:, i] * each[i][:, j] for i in range(FIELDS - 1) for j in range(i + 1, FIELDS)]
        return torch.sigmoid(self.linear(x).squeeze(1) + torch.stack(products, 1).sum((1, 2)))


@form(field_columns)
class XDeepFM(nn.Module):
    """Compressed interaction network: one convolution over all pairs of fields."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.linear = FeaturesEmbedding(), FeaturesLinear()
        self.convolutions = nn.ModuleList([nn.Conv1d(FIELDS * FIELDS, 6, 1), nn.Conv1d(FIELDS * 3, 6, 1)])
        self.fc = nn.Linear(3 + 6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = hidden = self.embedding(x)
        kept = []
        for number, convolution in enumerate(self.convolutions):
            pairs = (first.unsqueeze(2) * hidden.unsqueeze(1)).flatten(1, 2)
            pairs = F.relu(convolution(pairs))
            if number == 0:
                pairs, hidden = torch.split(pairs, 3, dim=1)
            kept.append(pairs)
        return torch.sigmoid(self.linear(x) + self.fc(torch.cat(kept, 1).sum(2))).squeeze(1)


@form(field_columns)
class AutoInt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = FeaturesEmbedding()
        self.attention = nn.MultiheadAttention(DIM, 2, dropout=0.1)
        self.residual, self.fc = nn.Linear(DIM, DIM), nn.Linear(FIELDS * DIM, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        vectors = self.embedding(x)
        crossed = vectors.transpose(0, 1)  # fields first
        crossed, _ = self.attention(crossed, crossed, crossed)
        crossed = F.relu(crossed.transpose(0, 1) + self.residual(vectors))
        return torch.sigmoid(self.fc(crossed.contiguous().view(-1, FIELDS * DIM))).squeeze(1)


@form(field_columns)
class FiBiNet(nn.Module):
    """Squeeze and excitation over fields, then bilinear products of pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = FeaturesEmbedding()
        self.excite = mlp(FIELDS, 2, FIELDS)
        self.bilinear = nn.Linear(DIM, DIM, bias=False)
        self.top = mlp(2 * FIELDS * DIM, 16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        vectors = self.embedding(x)
        scaled = vectors * F.relu(self.excite(vectors.mean(-1))).unsqueeze(-1)
        crossed = []
        for each in (vectors, scaled):
            parts = torch.split(each, 1, dim=1)
            crossed += [self.bilinear(parts[i]) * parts[j] for i in range(FIELDS) for j in range(i + 1, FIELDS)]
        return torch.sigmoid(self.top(torch.cat(crossed, 1).flatten(1))).squeeze(1)


@form(field_columns)
class AttentionalFM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.attention = FeaturesEmbedding(), mlp(DIM, 4, 1)
        self.p = nn.Linear(DIM, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        vectors = self.embedding(x)
        rows = [i for i in range(FIELDS - 1) for _ in range(i + 1, FIELDS)]
        columns = [j for i in range(FIELDS - 1) for j in range(i + 1, FIELDS)]
        products = vectors[:, rows] * vectors[:, columns]
        weights = F.dropout(F.softmax(self.attention(products), dim=1), p=0.2, training=self.training)
        return torch.sigmoid(self.p((weights * products).sum(1))).squeeze(1)


@form(field_columns)
class ProductNetwork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.kernel = FeaturesEmbedding(), nn.Parameter(torch.rand(DIM, 3, DIM))
        self.top = mlp(FIELDS * DIM + 3, 16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        v = self.embedding(x)
        p, q = v[:, [0, 0, 1]], v[:, [1, 2, 2]]
        outer = ((p.unsqueeze(1) * self.kernel).sum(-1).permute(0, 2, 1) * q).sum(-1)
        return torch.sigmoid(self.top(torch.cat([v.flatten(1), outer], 1))).squeeze(1)


@form(field_columns)
class FieldWeightedFM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.fields = FeaturesEmbedding(), nn.Parameter(torch.rand(FIELDS, FIELDS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        v = self.embedding(x)
        weights = torch.triu((self.fields + self.fields.t()) / 2, diagonal=1)
        return torch.sigmoid((torch.einsum("bid,bjd->bij", v, v) * weights).sum((1, 2)))


@form(field_columns)
class AdaptiveFactorization(nn.Module):
    """Logarithms of absolute vectors, and exponents of their sums; batch normalisation between them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.logarithms = FeaturesEmbedding(), nn.Linear(FIELDS, 4)
        self.norm, self.fc = nn.BatchNorm1d(4), nn.Linear(4 * DIM, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        v = torch.clamp(torch.abs(self.embedding(x)), min=1e-4)
        crossed = torch.exp(self.norm(self.logarithms(torch.log(v).transpose(1, 2)).transpose(1, 2)))
        return torch.sigmoid(self.fc(crossed.flatten(1))).squeeze(1)


@form(lambda draw: {"x": draw.keys(draw.samples, 2, rows=30), "age": draw.floats()})
class WideAndDeep(nn.Module):
    """Crossed columns are hashed into a wide table."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.user, self.item = nn.Embedding(64, 1), nn.Embedding(30, DIM), nn.Embedding(30, DIM)
        self.deep = mlp(2 * DIM + 1, 16, 1)

    def forward(self, x: torch.Tensor, age: torch.Tensor) -> torch.Tensor:
        crossed = (x[:, 0] * 1000003 + x[:, 1]) % 64
        deep = self.deep(torch.cat([self.user(x[:, 0]), self.item(x[:, 1]), age.view(-1, 1)], 1))
        return torch.sigmoid(self.wide(crossed) + deep).squeeze(-1)


def deepctr_matrix(draw: Draw) -> tuple[torch.Tensor]:
    """DeepCTR-Torch: keys, keys of a history, and numbers in one float matrix."""
    parts = [draw.keys(draw.samples, 2).float(), draw.floats(draw.samples, 2), draw.history(length=4).float()]
    return (torch.cat(parts, 1),)


@form(deepctr_matrix)
class DeepCTRMatrix(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding_dict = nn.ModuleDict({name: nn.Embedding(ROWS, DIM) for name in ("user", "item")})
        self.linear = nn.ModuleDict({name: nn.Embedding(ROWS, 1) for name in ("user", "item")})
        self.index = {"user": (0, 1), "item": (1, 2), "price": (2, 4), "hist": (4, 8)}
        self.fc = nn.Linear(3 * DIM + 2, 1)

    def column(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x[:, self.index[name][0] : self.index[name][1]]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        vectors = [self.embedding_dict[name](self.column(x, name).long()) for name in ("user", "item")]
        hist = self.column(x, "hist").long()
        vectors.append(masked_mean(self.embedding_dict["item"](hist), hist != 0).unsqueeze(1))
        wide = sum(self.linear[name](self.column(x, name).long()) for name in ("user", "item"))
        deep = torch.cat([torch.cat(vectors, 1).flatten(1), self.column(x, "price")], 1)
        return torch.sigmoid(wide.squeeze(-1) + self.fc(deep))


def rechub(draw: Draw) -> tuple[dict[str, torch.Tensor]]:
    return ({"item": draw.keys(), "hist": draw.history(), "age": draw.floats(), "city": draw.keys(rows=10)},)


@form(rechub)
class TorchRechubDict(nn.Module):
    """forward(x: dict); the history shares the item's table; padding is masked by the keys."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_dict = nn.ModuleDict({"item": nn.Embedding(ROWS, DIM, padding_idx=0), "city": nn.Embedding(10, DIM)})
        self.mlp = mlp(3 * DIM + 1, 16, 1)

    def forward(self, x: dict[str, torch.Tensor]) -> torch.Tensor:
        dense = [value.float().unsqueeze(1) for name, value in x.items() if name == "age"]
        mask = (x["hist"] != 0).float().unsqueeze(1)
        pooled = torch.bmm(mask, self.embed_dict["item"](x["hist"])).squeeze(1) / (mask.sum(-1) + 1e-16)
        columns = [self.embed_dict[name](x[name]) for name in ("item", "city")]
        return torch.sigmoid(self.mlp(torch.cat([*columns, pooled, *dense], 1)).squeeze(1))


@form(lambda draw: {"item": draw.integers(0, 2**62, draw.samples), "user": draw.integers(-(2**62), 2**62, draw.samples)})
class CompositionalHashing(nn.Module):
    """Quotient and remainder tables, and a table of hashed keys; keys are any 64-bit numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.remainder, self.quotient, self.hashed = nn.Embedding(37, DIM), nn.Embedding(ROWS, DIM), nn.Embedding(ROWS, DIM)
        self.fc = nn.Linear(2 * DIM, 1)

    def forward(self, item: torch.Tensor, user: torch.Tensor) -> torch.Tensor:
        both = self.remainder(item % 37) * self.quotient((item // 37) % ROWS)
        hashed = ((user ^ (user >> 33)) * -49064778989728563) % ROWS
        return self.fc(torch.cat([both, self.hashed(hashed)], 1)).squeeze(1)


def two_tower(draw: Draw) -> dict[str, torch.Tensor]:
    return {"user": draw.keys(), "hist": draw.history(), "item": draw.keys(), "price": draw.floats()}


@form(two_tower, per_request=("user", "hist"))
class TwoTower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(ROWS, DIM), nn.Embedding(ROWS, DIM, padding_idx=0)
        self.left, self.right = mlp(2 * DIM, 16, 8), mlp(DIM + 1, 16, 8)

    def forward(self, user: torch.Tensor, hist: torch.Tensor, item: torch.Tensor, price: torch.Tensor) -> torch.Tensor:
        left = self.left(torch.cat([self.user(user), masked_mean(self.item(hist), hist != 0)], 1))
        right = self.right(torch.cat([self.item(item), price[:, None]], 1))
        return (F.normalize(left, dim=1) * F.normalize(right, dim=1)).sum(1)


@form(lambda draw: {"query": draw.keys(draw.samples, 4), "documents": draw.keys(draw.samples, 3)})
class DSSM(nn.Module):
    """Cosine similarities of a query and its candidates."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.documents = nn.EmbeddingBag(ROWS, DIM, mode="sum"), nn.Embedding(ROWS, DIM)
        self.left, self.right = mlp(DIM, 8, 8), mlp(DIM, 8, 8)

    def forward(self, query: torch.Tensor, documents: torch.Tensor) -> torch.Tensor:
        left = self.left(torch.tanh(self.words(query))).unsqueeze(1)
        return torch.cosine_similarity(left, self.right(self.documents(documents)), dim=2).softmax(1)


@form(lambda draw: {"x": draw.keys(draw.samples, FIELDS)})
class MMoE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(ROWS, DIM)
        self.experts = nn.ModuleList([mlp(FIELDS * DIM, 8, 4) for _ in range(3)])
        self.gates = nn.ModuleList([nn.Sequential(nn.Linear(FIELDS * DIM, 3), nn.Softmax(dim=1)) for _ in range(2)])
        self.towers = nn.ModuleList([mlp(4, 4, 1) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        flat = self.embedding(x).view(-1, FIELDS * DIM)
        experts = torch.cat([expert(flat).unsqueeze(1) for expert in self.experts], dim=1)
        mixed = [torch.bmm(gate(flat).unsqueeze(1), experts).squeeze(1) for gate in self.gates]
        return [torch.sigmoid(tower(one).squeeze(1)) for tower, one in zip(self.towers, mixed, strict=True)]


@form(lambda draw: {"x": draw.keys(draw.samples, FIELDS)})
class PLE(nn.Module):
    """Progressive layered extraction: own and shared experts, a dict of outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(ROWS, DIM)
        self.own = nn.ModuleDict({task: mlp(FIELDS * DIM, 8) for task in ("click", "buy")})
        self.shared = mlp(FIELDS * DIM, 8)
        self.gate = nn.ModuleDict({task: nn.Linear(FIELDS * DIM, 2) for task in ("click", "buy")})
        self.tower = nn.ModuleDict({task: nn.Linear(8, 1) for task in ("click", "buy")})

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        flat, found = self.embedding(x).flatten(1), {}
        for task, own in self.own.items():
            experts = torch.stack([own(flat), self.shared(flat)], 2)
            mixed = (experts * self.gate[task](flat).softmax(1).unsqueeze(1)).sum(2)
            found[task] = torch.sigmoid(self.tower[task](mixed)).squeeze(1)
        return found


@form(lambda draw: {"user": draw.keys(), "item": draw.keys()})
class ESMM(nn.Module):
    """Click rate, and its product with the conversion rate."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(ROWS, DIM), nn.Embedding(ROWS, DIM)
        self.click, self.convert = mlp(2 * DIM, 8, 1), mlp(2 * DIM, 8, 1)

    def forward(self, user: torch.Tensor, item: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        both = torch.cat([self.user(user), self.item(item)], 1)
        click = torch.sigmoid(self.click(both))
        return click, click * torch.sigmoid(self.convert(both))


@form(lambda draw: {"user": draw.keys(), "item": draw.keys()})
class NeuralCF(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.user_gmf, self.item_gmf = nn.Embedding(ROWS, 4), nn.Embedding(ROWS, 4)
        self.user_mlp, self.item_mlp = nn.Embedding(ROWS, DIM), nn.Embedding(ROWS, DIM)
        self.mlp, self.fc = mlp(2 * DIM, 8, 4), nn.Linear(8, 1)

    def forward(self, user: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
        deep = self.mlp(torch.cat((self.user_mlp(user), self.item_mlp(item)), -1))
        return self.fc(torch.cat((self.user_gmf(user) * self.item_gmf(item), deep), -1)).view(-1)


@form(lambda draw: {"user": draw.keys(), "item": draw.keys()})
class BiasedMatrixFactorization(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(ROWS, DIM, sparse=True), nn.Embedding(ROWS, DIM, sparse=True)
        self.user_bias, self.item_bias = nn.Embedding(ROWS, 1), nn.Embedding(ROWS, 1)
        self.mean = nn.Parameter(torch.tensor(3.5))

    def forward(self, user: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
        biases = self.user_bias(user).squeeze() + self.item_bias(item).squeeze()
        return (self.user(user) * self.item(item)).sum(-1) + biases + self.mean


def light_fm(draw: Draw) -> dict[str, torch.Tensor]:
    keys, offsets = draw.bags()
    return {"user": draw.keys(), "tags": keys, "offsets": offsets}


@form(light_fm)
class LightFM(nn.Module):
    """An item is the sum of its features' vectors and biases."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.user_bias = nn.Embedding(ROWS, DIM), nn.Embedding(ROWS, 1)
        self.tags, self.tag_bias = nn.EmbeddingBag(ROWS, DIM, mode="sum"), nn.EmbeddingBag(ROWS, 1, mode="sum")

    def forward(self, user: torch.Tensor, tags: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        product = (self.user(user) * self.tags(tags, offsets)).sum(1)
        return torch.sigmoid(product + self.user_bias(user).squeeze(1) + self.tag_bias(tags, offsets).squeeze(1))


@form(lambda draw: {"item": draw.keys(), "user": draw.keys()})
class LightFMByBuffer(nn.Module):
    """The features of an item are a stored matrix of keys."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("features", torch.randint(0, ROWS, (ROWS, 3)))
        self.tags, self.user = nn.Embedding(ROWS, DIM), nn.Embedding(ROWS, DIM)

    def forward(self, item: torch.Tensor, user: torch.Tensor) -> torch.Tensor:
        return (self.tags(self.features[item]).sum(1) * self.user(user)).sum(1)


@form(lambda draw: {"user": draw.keys(), "item": draw.keys()})
class KnowledgeGraph(nn.Module):
    """KGCN: stored neighbours and relations of two hops, weighted by the user."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.entity, self.relation = nn.Embedding(ROWS, DIM), nn.Embedding(ROWS, DIM), nn.Embedding(6, DIM)
        self.register_buffer("neighbours", torch.randint(0, ROWS, (ROWS, 4)))
        self.register_buffer("relations", torch.randint(0, 6, (ROWS, 4)))
        self.fc = nn.Linear(DIM, DIM)

    def forward(self, user: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
        person, entities, relations = self.user(user), [item.view(-1, 1)], []
        for _ in range(2):
            relations.append(self.relations[entities[-1]].flatten(1))
            entities.append(self.neighbours[entities[-1]].flatten(1))
        vectors = [self.entity(entity) for entity in entities]
        for hop in (1, 0):
            scores = (person.view(-1, 1, 1, DIM) * self.relation(relations[hop]).view(-1, 4**hop, 4, DIM)).mean(-1).softmax(-1)
            mixed = (scores.unsqueeze(-1) * vectors[hop + 1].view(-1, 4**hop, 4, DIM)).sum(2)
            vectors[hop] = torch.tanh(self.fc(vectors[hop] + mixed))
        return torch.sigmoid((person * vectors[0].view(-1, DIM)).sum(1))


def adjacency() -> torch.Tensor:
    links = (torch.arange(ROWS)[:, None] * 7 + torch.arange(ROWS)) % 5 == 0
    return links.float() / links.sum(1, keepdim=True)


@form(lambda draw: {"user": draw.keys(), "item": draw.keys()})
class GraphPropagation(nn.Module):
    """As NGCF: the table is propagated over stored links, then read; another table is read as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.item, self.item_id = nn.Embedding(ROWS, DIM), nn.Embedding(ROWS, DIM), nn.Embedding(ROWS, DIM)
        self.register_buffer("links", adjacency())
        self.first = nn.Linear(DIM, DIM)

    def forward(self, user: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
        propagated = F.leaky_relu(self.first(self.links @ self.item.weight))
        return (self.user(user) * (propagated[item] + self.item_id(item))).sum(1)


@form(lambda draw: {"user": draw.keys(), "item": draw.keys()}, refused="no lookup")
class LightGCN(nn.Module):
    """All that it reads is computed from its one table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(2 * ROWS, DIM)
        self.register_buffer("links", torch.eye(2 * ROWS).roll(1, 0).to_sparse())

    def forward(self, user: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
        layers = [self.table.weight]
        for _ in range(2):
            layers.append(torch.sparse.mm(self.links, layers[-1]))
        users, items = torch.stack(layers, 1).mean(1).split(ROWS)
        return (users[user] * items[item]).sum(1)


@form(lambda draw: {"user": draw.keys(), "cand": draw.keys(draw.samples, 6)})
def candidates() -> nn.Module:
    """One user and several candidates in a sample."""

    class Candidates(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.user, self.item = nn.Embedding(ROWS, DIM), nn.Embedding(ROWS, DIM)

        def forward(self, user: torch.Tensor, cand: torch.Tensor) -> torch.Tensor:
            return torch.bmm(self.item(cand), self.user(user).unsqueeze(2)).squeeze(2)

    return Candidates()


@form(
    lambda draw: {"hour": draw.integers(0, 24, draw.samples), "day": draw.integers(0, 7, draw.samples), "item": draw.keys()},
    item=embedding(),
    day=embedding(7, 4),
    fc=linear(DIM + 4 + 26),
)
def integer_features(self: Any, hour: torch.Tensor, day: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
    """Integers that are no keys: one-hot, cyclic, and one that is both."""
    angle = 2 * torch.pi * hour / 24
    numbers = [F.one_hot(hour, 24), torch.sin(angle).unsqueeze(1), (day % 2 == 0).float().unsqueeze(1)]
    return self.fc(torch.cat([self.item(item), self.day(day), *numbers], 1)).squeeze(1)


@form(
    lambda draw: {"price": draw.floats() * 100 - 5, "item": draw.keys()},
    bucket=embedding(6),
    item=embedding(),
    boundaries=torch.tensor([0.0, 1.0, 10.0, 50.0, 90.0]),
    fc=linear(2 * DIM),
)
def bucketized(self: Any, price: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
    """A price becomes the key of its bucket."""
    found = self.bucket(torch.bucketize(price, self.boundaries, right=True))
    return self.fc(torch.cat([found, self.item(item)], 1)).squeeze(1)


@form(
    lambda draw: {"price": draw.floats(draw.samples, 2), "item": draw.keys()},
    item=embedding(),
    parts=lambda: nn.Parameter(torch.rand(2, 4, DIM)),
    fc=linear(),
)
def automatic_discretization(self: Any, price: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
    """AutoDis: soft buckets, whose vectors are no table."""
    weights = (price.unsqueeze(-1) * torch.arange(4)).softmax(-1)
    return self.fc(torch.einsum("bfk,fkd->bd", weights, self.parts) + self.item(item)).squeeze(1)


@form(
    lambda draw: {"a": draw.keys(), "b": draw.keys()}, vocabulary=(torch.arange(ROWS) * 31) % ROWS, e=embedding(), fc=linear()
)
def stored_vocabulary(self: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """A stored vector maps raw ids to rows."""
    return self.fc(self.e(self.vocabulary[a]) * self.e(self.vocabulary[b])).squeeze(1)


@form(lambda draw: {"user": draw.keys(), "hist": draw.history()}, per_request=("user",), tolerance=2e-6)
class YouTubeDNN(nn.Module):
    """The logits of all items, against the table that the history is read from."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(ROWS, DIM), nn.EmbeddingBag(ROWS, DIM, mode="mean", padding_idx=0)
        self.mlp = mlp(2 * DIM, 16, DIM)

    def forward(self, user: torch.Tensor, hist: torch.Tensor) -> torch.Tensor:
        return self.mlp(torch.cat([self.user(user), self.item(hist)], 1)) @ self.item.weight.t()


@form(lambda draw: {"x": draw.keys(draw.samples, 12)}, slow=True)
class ManyTables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList([nn.Embedding(ROWS, 4) for _ in range(12)])
        self.top = mlp(48, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.top(torch.cat([table(x[:, k] % (ROWS - k)) for k, table in enumerate(self.tables)], 1)).squeeze(1)


@form(
    lambda draw: {"x": draw.keys(draw.samples, 2), "tags": draw.history()}, bag=bag(mode="mean", padding_idx=0), e=embedding()
)
def neural_factorization(self: Any, x: torch.Tensor, tags: torch.Tensor) -> torch.Tensor:
    """NFM: bi-interaction of columns and a bag of tags."""
    v = torch.cat([self.e(x), self.bag(tags).unsqueeze(1)], 1)
    return 0.5 * (v.sum(1) ** 2 - (v**2).sum(1)).sum(1)
