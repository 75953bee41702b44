package main

import (
	"math"
	"testing"
)

func TestQuantileInterpolatesBetweenTheNearest(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name   string
		values []float64
		q      float64
		want   float64
	}{
		{"one value", []float64{7}, 0.95, 7},
		{"the middle of an odd number", []float64{3, 1, 2}, 0.5, 2},
		{"between the middle two of an even number", []float64{4, 1, 3, 2}, 0.5, 2.5},
		{"the least", []float64{4, 1, 3, 2}, 0, 1},
		{"the greatest", []float64{4, 1, 3, 2}, 1, 4},
		{"between two near the end", []float64{0, 10, 20, 30, 40}, 0.95, 38},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			if got := quantile(test.values, test.q); math.Abs(got-test.want) > 1e-9 {
				t.Errorf("quantile(%v, %v) = %v, want %v", test.values, test.q, got, test.want)
			}
		})
	}
}

func TestQuantileOfNothingIsNotANumber(t *testing.T) {
	t.Parallel()
	if got := quantile(nil, 0.5); !math.IsNaN(got) {
		t.Errorf("got %v", got)
	}
	if got := ratioOf(nil, []float64{1}); !math.IsNaN(got.Value) {
		t.Errorf("got a ratio of %v", got.Value)
	}
}

func TestQuantileLeavesItsArgumentInOrder(t *testing.T) {
	t.Parallel()
	values := []float64{3, 1, 2}
	median(values)
	if values[0] != 3 || values[1] != 1 || values[2] != 2 {
		t.Errorf("sorted in place: %v", values)
	}
}

func TestRatioOfProportionalSeriesIsCertain(t *testing.T) {
	t.Parallel()
	a, b := make([]float64, 51), make([]float64, 51)
	for i := range a {
		// Rounds of very different length, as on a noisy machine: the ratio within
		// each is the same, so the interval must be a point.
		b[i] = float64(i%7 + 1)
		a[i] = 3 * b[i]
	}
	if got := ratioOf(a, b); got != (interval{3, 3, 3}) {
		t.Errorf("got %v", got)
	}
}

func TestRatioIntervalHoldsTheEstimateAndRepeats(t *testing.T) {
	t.Parallel()
	a := []float64{2.0, 2.4, 1.9, 2.2, 2.1, 3.0, 2.0, 2.3}
	b := []float64{1.0, 1.1, 0.9, 1.3, 1.0, 1.2, 0.8, 1.1}
	got := ratioOf(a, b)
	if got.Low > got.Value || got.High < got.Value || got.Low == got.High {
		t.Errorf("%v is not inside of its interval %v to %v", got.Value, got.Low, got.High)
	}
	if again := ratioOf(a, b); again != got {
		t.Errorf("first %v, then %v", got, again)
	}
}
