"""Everything that a repository holds, named or not: its manifests, and what each of them refers to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NoReturn

from shardkit.errors import FormatError, IntegrityError, NotFoundError
from shardkit.manifest import Manifest, PageRef, ShardTable, unpack_page
from shardkit.reading.inventory import Inventory, read_root
from shardkit.repository.repository import Repository
from shardkit.stores.store import object_name, parse_object_name

_OBJECTS = "objects/"


class StoreSurvey:
    """One listing of a repository's objects, with all manifests among them loaded.

    Objects are listed in the root, and read from wherever they are good: a damaged manifest or page in the root must
    not make a version look as if it needed nothing.

    Attributes:
        repository: reads the root and all its locations.
        names: of all objects.
        manifests: id → manifest, of all that can be read, whether a ref or tag names them or not.
        unreadable: names of damaged manifests; what they refer to is not known.
    """

    def __init__(self, repository: Repository) -> None:
        self.repository = Repository.open(repository.url, read_only=True)
        self.names: set[str] = set()
        self.manifests: dict[str, Manifest] = {}
        self.unreadable: list[str] = []
        self._pages: dict[str, ShardTable] = {}
        for name in repository.store.list_after(_OBJECTS):
            try:
                digest, kind = parse_object_name(name)
            except FormatError:
                continue  # a foreign file
            self.names.add(name)
            if kind == "manifest":
                self._load(digest, name)
        head = repository.head()
        self._named = frozenset((*head.refs.values(), *head.tags.values()) if head else ())
        for digest in sorted(self._named - self.manifests.keys()):  # not in the root, perhaps elsewhere
            self._load(digest, object_name(digest, "manifest"))

    def _load(self, digest: str, name: str) -> None:
        try:
            self.manifests[digest] = read_root(self.repository, digest)
        except (IntegrityError, FormatError):
            self.unreadable.append(name)
        except NotFoundError:
            self.names.discard(name)  # deleted since it was listed

    def pages(self, manifest: Manifest) -> list[ShardTable]:
        """The pages of a manifest as tables.

        Raises:
            NotFoundError, IntegrityError, FormatError: one is gone or damaged.
        """
        return [self._page(ref, len(manifest.strata)) for ref in manifest.pages]

    def table(self, manifest: Manifest) -> ShardTable:
        return ShardTable.concatenate(self.pages(manifest))

    def _page(self, ref: PageRef, strata: int) -> ShardTable:
        found = self._pages.get(ref.digest)
        if found is None:
            data = self.repository.get_object(ref.digest, "page", ref.size)
            found = self._pages[ref.digest] = unpack_page(data, ref, strata=strata)
        return found

    def references(self, manifest: Manifest) -> Iterator[str]:
        """Names of all objects that a manifest needs, its own among them; those of its parts are the parts'."""
        return (name for name, _ in Inventory(manifest, tuple(self.pages(manifest))).names())

    def live(self, without: set[str]) -> set[str]:
        """Names that some manifest needs which is not in ``without`` (ids).

        Raises:
            IntegrityError: a version that a ref or tag names is good nowhere: what it needs is not known.
        """
        for identity in sorted(self._named - without - self.manifests.keys()):
            self._refuse(identity, "its manifest is good nowhere")
        needed: set[str] = set()
        for identity, manifest in self.manifests.items():
            if identity not in without:
                try:
                    needed.update(self.references(manifest))
                except (NotFoundError, IntegrityError, FormatError) as error:
                    if identity in self._named:
                        self._refuse(identity, str(error))
                    continue  # a version that nothing names and that was broken before: it can lose nothing more
        return needed

    def _refuse(self, identity: str, why: str) -> NoReturn:
        url = self.repository.url
        raise IntegrityError(
            f"version {identity} of {url} cannot be read, so that it is not known what it needs ({why}); nothing was "
            f"deleted; run: shardkit repair {url}, then: shardkit remove {url} --resume"
        )
