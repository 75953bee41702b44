package ident

import (
	"encoding/binary"
	"math/bits"
)

// Sum256 is SHA-256 (FIPS 180-4), for names: crypto/sha256 would bring all of Go's FIPS 140
// module into the plugin, 217 kB, which each call reads from disk and initializes.
func Sum256(data []byte) [32]byte {
	// The first bits of the fractions of the first primes' square roots: section 5.3.3.
	h := state{0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19}
	length := uint64(len(data)) * 8
	for len(data) >= blockSize {
		h.mix(data[:blockSize])
		data = data[blockSize:]
	}
	// The rest, a bit that is set, and the length at the end of a block.
	last := append(make([]byte, 0, 2*blockSize), data...)
	last = append(last, 0x80)
	for len(last)%blockSize != blockSize-8 {
		last = append(last, 0)
	}
	last = binary.BigEndian.AppendUint64(last, length)
	for ; len(last) > 0; last = last[blockSize:] {
		h.mix(last[:blockSize])
	}
	var sum [32]byte
	for i, word := range h {
		binary.BigEndian.PutUint32(sum[4*i:], word)
	}
	return sum
}

const blockSize = 64

// state is H of section 6.2.
type state [8]uint32

// mix is one round of section 6.2.2, over a block.
func (h *state) mix(block []byte) {
	var w [64]uint32
	for t := range 16 {
		w[t] = binary.BigEndian.Uint32(block[4*t:])
	}
	for t := 16; t < len(w); t++ {
		a, b := w[t-15], w[t-2]
		w[t] = w[t-16] + w[t-7] + (rotate(a, 7) ^ rotate(a, 18) ^ a>>3) + (rotate(b, 17) ^ rotate(b, 19) ^ b>>10)
	}
	// The same of their cube roots: section 4.2.2.
	constants := [...]uint32{
		0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
		0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
		0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
		0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
		0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
		0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
		0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
		0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
	}
	v := *h
	for t, word := range w {
		a, e := v[0], v[4]
		one := v[7] + (rotate(e, 6) ^ rotate(e, 11) ^ rotate(e, 25)) + (e&v[5] ^ ^e&v[6]) + constants[t] + word
		two := (rotate(a, 2) ^ rotate(a, 13) ^ rotate(a, 22)) + (a&v[1] ^ a&v[2] ^ v[1]&v[2])
		v = state{one + two, a, v[1], v[2], v[3] + one, e, v[5], v[6]}
	}
	for i := range h {
		h[i] += v[i]
	}
}

func rotate(x uint32, right int) uint32 { return bits.RotateLeft32(x, -right) }
