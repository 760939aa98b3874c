"""Which data sets have names, where their files are published, and what their checksums are.

Commits and checksums pin what can be pinned; of the rest, what was fetched is recorded beside it.
"""

from __future__ import annotations

from dataclasses import dataclass

_PLANETOID = "https://github.com/kimiyoung/planetoid/raw/af6abf468a772cc055bec88c52e4d6f51b7c37e3/data/"
_SHCHUR = "https://github.com/shchur/gnn-benchmark/raw/1e72912a0810cdf27ae54fd589a3b43358a2b161/data/npz/"
_HETEROPHILOUS = (
    "https://github.com/yandex-research/heterophilous-graphs/raw/"
    "a431395582e929d88271309716bea4fe24ce6318/data/"
)
_OGB = "https://snap.stanford.edu/ogb/data/"


@dataclass(frozen=True)
class Remote:
    """A file to fetch: its publisher's address, its place below a mirror's, and its checksum, "sha256:..." or
    "git:..." (the name that git gives its content), or None where none is known.
    """

    url: str
    place: str
    checksum: str | None = None

    @property
    def name(self) -> str:
        """The file's own name."""
        return self.place.rpartition("/")[2]


@dataclass(frozen=True)
class Entry:
    """A named data set: its place in the data folder, files that make it up, other places it may be found at,
    and whether its one file is a zip of the folder.
    """

    path: str
    files: tuple[Remote, ...]
    also: tuple[str, ...] = ()
    unzip: bool = False


_PARTS = ("x", "tx", "allx", "y", "ty", "ally", "graph", "test.index")
_CHECKSUMS = {
    "ind.cora.x": "sha256:23cfa55d91c6f624233f5eb7b6e3f141f1bd2b2ae39608a63cf5d084bb27baab",
    "ind.cora.tx": "sha256:b9afbaa4a400df991f6f02ef677e1e44da55ffc04801fd02f9e673987829226a",
    "ind.cora.allx": "sha256:9419ba2f26f5c35243db64aba110e0f35a04851609e0dc5433450676ca6b8543",
    "ind.cora.y": "sha256:94465c14eb53e04ca262198dcbb2521ee8af60fb3f3d546cd6ca24a511b0e7d1",
    "ind.cora.ty": "sha256:41f5ac76596a1699cc33f53084a2419e92961c42bb75f36fc38e616d348532ad",
    "ind.cora.ally": "sha256:2b998f5cc7fedc86e7f97ca2498f47a1ffc1462c29e2d578b23bf3f62b6e7d71",
    "ind.cora.graph": "sha256:58f13302f39dde8852dad6fe6d15b89b077b6d7f837626bce671ef80344b383d",
    "ind.cora.test.index": "sha256:297ce89af2b51a6a194181c7dbe1796c6a1cf9cd9349a88383b1b1e227867875",
    "ind.citeseer.x": "sha256:d20de19150741e555de0ed037195630fc194114ebc7fd72ced62810148aa22f6",
    "ind.citeseer.tx": "sha256:539a8906a2da97628d212f2fdd668c109a8b3f0d36574b59e5d3fd5b5303da21",
    "ind.citeseer.allx": "sha256:2ac30345d95c9ec933a817ee0bdd6a5f077f8c184a20e696910192d534414668",
    "ind.citeseer.y": "sha256:8ba87e515d8e3ee3cf52f6d2c5b86aa73f11ecad825a808455209ec26cd54924",
    "ind.citeseer.ty": "sha256:55e5bd1ba1e733a04598753ad1a8d57957f4b8f89e74519f41f4f4938767e4ce",
    "ind.citeseer.ally": "sha256:f704b2d986dde6c2669934de1f3ae5696a6cf9455c0f6b2646a2d135ea0a1c95",
    "ind.citeseer.graph": "sha256:d79a4ef9d3e7169aee8946145f6b7306e35bc79bffad26346cfb94e10e9912a7",
    "ind.citeseer.test.index": "sha256:2af990671580b6b2df5d158d1038f8292e30c9cd821b5453f399659b25b723d4",
    "ind.pubmed.x": "sha256:fbe9cb5c47200d1b7769a26e579be3b7130b556831f9d850e77c4c74f2599b33",
    "ind.pubmed.tx": "sha256:4eb5f5d0f30f26497eb0ac6ac9719d09c67e284f1ed0385c93f3ef27a671da3d",
    "ind.pubmed.allx": "git:3b86bccf08111c37c632a9dd8ab63db25ea76361",
    "ind.pubmed.y": "sha256:e6c807633307a07ed659249006536a147c7999c797f11a2560752990181b41b3",
    "ind.pubmed.ty": "sha256:ee2e0d4819d9fbcc403689c3bf2e49face401b605932f093bc58ab6461130fdd",
    "ind.pubmed.ally": "sha256:0c37bbe3b5014ec365e9d393cf4791925e5ed94fb194305d74f064a8d7b50f0e",
    "ind.pubmed.graph": "sha256:5b89f0036ca22909471f1e6558eb42fa06e0c730a577bde5b058b40638f81dc9",
    "ind.pubmed.test.index": "sha256:b101d421688bbaecbd82e8a18f1e282378d6830f3a37666f28ebc47f844341b5",
    "minesweeper.npz": "sha256:e664c8dacf1e8ac466c2c09ed4b237bd2c5541f47a6eae9c6092cb87f16412b3",
    "chameleon_filtered.npz": "sha256:bf46f07e1fb5249280447e5fe3100f3e82fc4b93ad1e13ffcfdec924b6ac0bb5",
}


def _planetoid(name: str) -> Entry:
    """The eight files of a Planetoid data set."""
    files = [f"ind.{name}.{part}" for part in _PARTS]
    place = f"planetoid/{name}"
    remotes = (Remote(_PLANETOID + file, f"{place}/{file}", _CHECKSUMS[file]) for file in files)
    return Entry(place, tuple(remotes), also=(name, "planetoid"))


def _one_file(base: str, folder: str, file: str, *also: str) -> Entry:
    """An `.npz`."""
    place = f"{folder}/{file}"
    return Entry(place, (Remote(base + file, place, _CHECKSUMS.get(file)),), also=(*also, file))


def _shchur(file: str) -> Entry:
    """Of "Pitfalls of GNN evaluation"."""
    converted = f"gnn_benchmark/{file.removesuffix('.npz')}.converted.npz"
    return _one_file(_SHCHUR, "gnn_benchmark", file, converted)


def _ogb(name: str, address: str) -> Entry:
    """An OGB raw directory, in a zip file."""
    folder = name.replace("-", "_")
    return Entry(f"ogb/{folder}", (Remote(_OGB + address, f"ogb/{address}"),), also=(folder,), unzip=True)


CATALOGUE: dict[str, Entry] = {
    **{name: _planetoid(name) for name in ("cora", "citeseer", "pubmed")},
    "ogbn-arxiv": _ogb("ogbn-arxiv", "nodeproppred/arxiv.zip"),
    "ogbn-products": _ogb("ogbn-products", "nodeproppred/products.zip"),
    "ogbn-proteins": _ogb("ogbn-proteins", "nodeproppred/proteins.zip"),
    "ogbn-papers100M": _ogb("ogbn-papers100M", "nodeproppred/papers100M-bin.zip"),
    "ogbl-ddi": _ogb("ogbl-ddi", "linkproppred/ddi.zip"),
    "amazon-computers": _shchur("amazon_electronics_computers.npz"),
    "amazon-photo": _shchur("amazon_electronics_photo.npz"),
    "coauthor-cs": _shchur("ms_academic_cs.npz"),
    "coauthor-physics": _shchur("ms_academic_phy.npz"),
    "minesweeper": _one_file(_HETEROPHILOUS, "heterophilous", "minesweeper.npz"),
    "tolokers": _one_file(_HETEROPHILOUS, "heterophilous", "tolokers.npz"),
    "roman-empire": _one_file(_HETEROPHILOUS, "heterophilous", "roman_empire.npz"),
    "amazon-ratings": _one_file(_HETEROPHILOUS, "heterophilous", "amazon_ratings.npz"),
    "questions": _one_file(_HETEROPHILOUS, "heterophilous", "questions.npz"),
    "chameleon-filtered": _one_file(_HETEROPHILOUS, "heterophilous", "chameleon_filtered.npz"),
}
