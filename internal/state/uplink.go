package state

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strings"

	"github.com/tombolo-cni/tombolo/internal/file"
)

// maxUplink is the largest size of an uplink's file, in bytes. The record has all former addresses and routes of the
// NIC, and a route takes some 200 bytes.
const maxUplink = 16 << 20

// An UplinkFile is the file with the record of one NIC's takeover (`tombolo uplink take`). Package uplink writes and
// reads the record as a whole, so readers see either the old or the new record. The first line is the node's epoch,
// since addresses and routes of an earlier epoch must not be put back.
//
// A caller that writes or removes the record holds the exclusive lock. An UplinkFile is not safe for use by several
// goroutines at once.
type UplinkFile struct {
	dir *Dir
	nic string
}

// Uplink returns the file of a NIC, which need not exist. If nic cannot be the name of a link, every method returns
// an error that matches ErrName.
func (d *Dir) Uplink(nic string) *UplinkFile { return &UplinkFile{dir: d, nic: nic} }

// Save replaces the record, which must be a JSON document.
func (f *UplinkFile) Save(record []byte) error {
	path, err := f.path()
	var epoch Epoch
	if err == nil {
		epoch, err = f.dir.newEpoch()
	}

	if err != nil {
		return fmt.Errorf("save record of uplink: %w", err)
	}

	data := append(Encode(&epoch.Version, &epoch), record...)
	switch {
	case len(data) > maxUplink:
		err = fmt.Errorf("it has %d bytes, at most %d are kept", len(data), maxUplink)
	case !json.Valid(record):
		err = fmt.Errorf("it is not JSON: %.60q", record)
	default:
		err = f.dir.replaceFile(path, data)
	}

	return withOperation(err, "save record of uplink %s", f.nic)
}

// Load reads the record. If there is none, the error matches os.ErrNotExist. If the record belongs to an earlier
// epoch, the error matches ErrStale. If the record cannot be used, the error wraps a *RecordError. Package uplink
// checks the contents.
func (f *UplinkFile) Load() ([]byte, error) {
	path, err := f.path()
	if err != nil {
		return nil, fmt.Errorf("load record of uplink: %w", err)
	}

	var epoch Epoch
	var record []byte
	data, err := file.Read(path, maxUplink)
	if err == nil {
		epoch, record, err = splitUplink(data)
	}

	if err != nil {
		err = (&RecordError{Path: path, NIC: f.nic}).Wrap(err)
	} else {
		err = f.dir.checkEpoch(path, epoch, f.dir.sources.netns)
	}

	if err != nil {
		return nil, fmt.Errorf("load record of uplink: %w", err)
	}

	return record, nil
}

// splitUplink splits the content of an uplink's file into its first line, the epoch, and the record, which is JSON.
func splitUplink(data []byte) (Epoch, []byte, error) {
	first, record, _ := bytes.Cut(data, []byte("\n"))
	epoch, err := decodeEpoch(first)
	if err != nil {
		return Epoch{}, nil, err
	}
	if !json.Valid(record) {
		return Epoch{}, nil, fmt.Errorf("%w: it is not whole JSON: %.60q", ErrDamaged, record)
	}
	return epoch, record, nil
}

// Remove removes the record. A missing record is no error.
func (f *UplinkFile) Remove() error {
	path, err := f.path()
	if err == nil {
		err = f.dir.remove(path)
	}
	return withOperation(err, "remove record of uplink")
}

// path returns the path of the NIC's file.
func (f *UplinkFile) path() (string, error) {
	if err := checkNIC(f.nic); err != nil {
		return "", err
	}
	return f.dir.uplinksPath() + "/" + f.nic + suffix, nil
}

// Uplinks returns the sorted names of all NICs that have a record. It reads no record, and needs no lock.
func (d *Dir) Uplinks() ([]string, error) {
	entries, err := file.ReadDir(d.uplinksPath())
	if err != nil {
		return nil, fmt.Errorf("list uplinks: %w", err)
	}

	var nics []string
	for _, e := range entries {
		if nic, ok := strings.CutSuffix(e.Name(), suffix); ok && checkNIC(nic) == nil {
			nics = append(nics, nic)
		}
	}
	return nics, nil
}
