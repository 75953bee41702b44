package teardown

import (
	"context"
	"time"

	"github.com/tombolo-cni/tombolo/network/internal/session"
)

// Listed is what Collect finds of an attachment.
type Listed = remains

// Unlisted is an attachment of which only the hash is known.
func Unlisted(hash string) *Listed { return &remains{hash: hash} }

func List(ctx context.Context, s *session.Session, network string) (map[string]*Listed, error) {
	return listAttachments(ctx, s, network)
}

func (t *Teardown) CollectOne(ctx context.Context, r *Listed, began time.Time) error {
	return t.collect(ctx, r, began)
}
