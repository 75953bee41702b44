package recorded

import (
	"errors"
	"io/fs"

	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/nft"
)

// Others are the networks, as the firewall has them, that attachments of other programs' are on and that
// no record tells of. admitted says that what one of these sends may pass other firewalls.
func Others(dir *state.Dir) (list []nft.Network, admitted bool, _ error) {
	others, _, err := dir.ListOthers()
	if err != nil {
		return nil, false, err
	}
	for _, a := range others {
		admitted = admitted || a.Admitted
		if len(list) > 0 && list[len(list)-1].Name == a.Network {
			continue
		}
		if _, err := dir.LoadNetwork(a.Network); errors.Is(err, fs.ErrNotExist) {
			list = append(list, nft.Network{Name: a.Network})
		}
	}
	return list, admitted, nil
}
