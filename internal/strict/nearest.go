package strict

import "strings"

// Nearest returns the name that is spelt most like key, or "" where none is
// close enough to be worth a hint. Case does not count, so that "isgateway"
// finds "isGateway".
func Nearest(key string, names []string) string {
	best, bestDistance := "", allowance(key)+1
	for _, name := range names {
		if d := distance(strings.ToLower(key), strings.ToLower(name)); d < bestDistance {
			best, bestDistance = name, d
		}
	}
	return best
}

// allowance is how many slips a key of this length may have: a quarter of it,
// but one at least and three at most; none below three letters, where every
// short name would be near.
func allowance(key string) int {
	if len(key) < 3 {
		return 0
	}
	return min(3, max(1, len(key)/4))
}

// distance counts the insertions, deletions, replacements and swaps of
// neighbours that turn a into b (optimal string alignment). It works on bytes,
// as the names are ASCII, and refuses monsters.
func distance(a, b string) int {
	const longest = 64
	if len(a) > longest || len(b) > longest {
		return longest
	}
	before := make([]int, len(b)+1)
	above := make([]int, len(b)+1)
	row := make([]int, len(b)+1)
	for j := range above {
		above[j] = j
	}
	for i := 1; i <= len(a); i++ {
		row[0] = i
		for j := 1; j <= len(b); j++ {
			cost := 1
			if a[i-1] == b[j-1] {
				cost = 0
			}
			row[j] = min(above[j]+1, row[j-1]+1, above[j-1]+cost)
			if i > 1 && j > 1 && a[i-1] == b[j-2] && a[i-2] == b[j-1] {
				row[j] = min(row[j], before[j-2]+1)
			}
		}
		before, above, row = above, row, before
	}
	return above[len(b)]
}
