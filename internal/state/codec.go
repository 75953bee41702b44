package state

import (
	"fmt"

	"github.com/tombolo-cni/tombolo/internal/strict"
)

// version is that of the records and files that we write.
const version = 1

// Encode returns a record, a pointer to a struct, as its file has it: on one line. v is its version.
func Encode(v *int, record any) []byte {
	*v = version
	return append(strict.Append(make([]byte, 0, 1024), record), '\n')
}

// Decode reads a record. It fails with ErrVersion if a newer version wrote it, else with ErrDamaged.
func Decode(data []byte, v *int, record any) error {
	err := strict.Unmarshal(data, record, strict.Everything)
	switch {
	case *v > version:
		return fmt.Errorf("%w: version %d, and this tombolo reads up to %d", ErrVersion, *v, version)
	case err == nil && *v < 1:
		return fmt.Errorf("%w: it has no version", ErrDamaged)
	}
	if err != nil {
		return fmt.Errorf("%w: %w", ErrDamaged, err)
	}
	return nil
}
