package containerd

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"os"
	"runtime"
)

// imageName is the image of the pods, which no registry has.
const imageName = "tombolo.test/pause:1"

// file is a file in an archive.
type file struct {
	name    string
	mode    int64
	content []byte
}

// writeImage packs a program as an image with this one file in it, in the form of
// `docker save`, which containerd imports.
func writeImage(path, program string) error {
	content, err := os.ReadFile(program)
	if err != nil {
		return err
	}
	layer, err := pack(file{"pause", 0o755, content})
	if err != nil {
		return err
	}
	type object = map[string]any
	config, err := json.Marshal(object{
		"architecture": runtime.GOARCH,
		"os":           runtime.GOOS,
		"config":       object{"Entrypoint": []string{"/pause"}},
		"rootfs":       object{"type": "layers", "diff_ids": []string{fmt.Sprintf("sha256:%x", sha256.Sum256(layer))}},
	})
	if err != nil {
		return err
	}
	manifest, err := json.Marshal([]object{{
		"Config": "config.json", "RepoTags": []string{imageName}, "Layers": []string{"layer.tar"},
	}})
	if err != nil {
		return err
	}
	image, err := pack(file{"config.json", 0o644, config}, file{"layer.tar", 0o644, layer}, file{"manifest.json", 0o644, manifest})
	if err != nil {
		return err
	}
	return os.WriteFile(path, image, 0o644)
}

func pack(files ...file) ([]byte, error) {
	var buf bytes.Buffer
	w := tar.NewWriter(&buf)
	for _, f := range files {
		if err := w.WriteHeader(&tar.Header{Name: f.name, Mode: f.mode, Size: int64(len(f.content))}); err != nil {
			return nil, err
		}
		if _, err := w.Write(f.content); err != nil {
			return nil, err
		}
	}
	if err := w.Close(); err != nil {
		return nil, err
	}
	return buf.Bytes(), nil
}
