package firewall

import "github.com/tombolo-cni/tombolo/internal/cni/reference"

// Examine says what ADD would find wrong with a configuration, by that alone.
func Examine(c *reference.Call) error {
	_, err := read(c)
	return err
}
