"""Packs a directory as an image of one layer, as `docker save` does.

usage: image.py OUT DIRECTORY CONFIG NAME...

CONFIG is the JSON of the image's configuration ({"Entrypoint": ["/pause"]}).
"""
import hashlib, io, json, sys, tarfile

out, root, config, names = sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), sys.argv[4:]


def by_root(entry):
    entry.uid = entry.gid = entry.mtime = 0
    entry.uname = entry.gname = "root"
    return entry


config.setdefault("Env", ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"])
packed = io.BytesIO()
with tarfile.open(fileobj=packed, mode="w") as tar:
    tar.add(root, arcname=".", filter=by_root)
layer = packed.getvalue()
sums = ["sha256:" + hashlib.sha256(layer).hexdigest()]
image = {"architecture": "amd64", "os": "linux", "config": config, "rootfs": {"type": "layers", "diff_ids": sums}}
manifest = [{"Config": "config.json", "RepoTags": names, "Layers": ["layer.tar"]}]
with tarfile.open(out, "w") as tar:
    for name, data in (("config.json", json.dumps(image).encode()), ("layer.tar", layer), ("manifest.json", json.dumps(manifest).encode())):
        entry = tarfile.TarInfo(name)
        entry.size = len(data)
        tar.addfile(entry, io.BytesIO(data))
