"""What a wheel and a source archive must hold: documents that the code names, types, and all of the tests."""

import re
import sys
import tarfile
import zipfile
from pathlib import Path, PurePosixPath

wheel = zipfile.ZipFile(sys.argv[2])
in_wheel = set(wheel.namelist())
faults = [
    f"the wheel has no {package}/py.typed"
    for package in ("deepspeed_partition", "lightning_madpipe")
    if f"{package}/py.typed" not in in_wheel
]
top_level = {PurePosixPath(name).parts[0] for name in in_wheel}
faults += [f"the wheel has {name}" for name in top_level if name.partition("-")[0] not in (
    "deepspeed_partition", "lightning_madpipe", "madpipe"
)]  # fmt: skip
for name in in_wheel:
    if name.endswith(".py"):
        for document in set(re.findall(r"[\w/]+\.md\b", wheel.read(name).decode())):
            if not any(other == document or other.endswith(f"/{document}") for other in in_wheel):
                faults.append(f"{name} names {document}, which the wheel does not have")
metadata = wheel.read(next(name for name in in_wheel if name.endswith(".dist-info/METADATA"))).decode()
faults += [
    f"the description has a link that a package index cannot follow: {link}"
    for link in re.findall(r"\]\((?!https?:)[^)]*\)", metadata)
]
with tarfile.open(sys.argv[3]) as archive:
    in_archive = {name.partition("/")[2] for name in archive.getnames()}
files = Path(sys.argv[1]).read_text().splitlines()
faults += [f"the source archive has no {name}" for name in files if name not in in_archive]
if faults:
    sys.exit("\n".join(faults))
print(f"package: {len(in_wheel)} files in the wheel, {len(in_archive)} in the source archive")
