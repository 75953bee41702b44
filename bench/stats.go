package main

import (
	"math"
	"math/rand/v2"
	"slices"
)

// quantile is the q-quantile (0 to 1) of values, interpolated between the two
// nearest. It is NaN for no values.
func quantile(values []float64, q float64) float64 {
	if len(values) == 0 {
		return math.NaN()
	}
	sorted := slices.Sorted(slices.Values(values))
	at := q * float64(len(sorted)-1)
	low, high := int(math.Floor(at)), int(math.Ceil(at))
	return sorted[low] + (at-float64(low))*(sorted[high]-sorted[low])
}

func median(values []float64) float64 { return quantile(values, 0.5) }

// interval is an estimate with its 95 % confidence interval.
type interval struct {
	Value float64 `json:"value"`
	Low   float64 `json:"low"`
	High  float64 `json:"high"`
}

// resamples is how often the bootstrap draws. 1000 steady a 95 % interval to the
// second digit, which is what is printed.
const resamples = 1000

// ratioOf is the ratio of the medians of a and b, where a[i] and b[i] were measured
// in the same round. The interval is a bootstrap over rounds: a round is drawn for
// both sides at once, so a slow spell of the machine, which hits both, does not
// widen it. The seed is fixed: the same measurements give the same report.
func ratioOf(a, b []float64) interval {
	n := min(len(a), len(b))
	if n == 0 {
		return interval{math.NaN(), math.NaN(), math.NaN()}
	}
	random := rand.New(rand.NewPCG(1, 2))
	ratios := make([]float64, resamples)
	drawnA, drawnB := make([]float64, n), make([]float64, n)
	for i := range ratios {
		for j := range n {
			round := random.IntN(n)
			drawnA[j], drawnB[j] = a[round], b[round]
		}
		ratios[i] = median(drawnA) / median(drawnB)
	}
	return interval{median(a) / median(b), quantile(ratios, 0.025), quantile(ratios, 0.975)}
}
