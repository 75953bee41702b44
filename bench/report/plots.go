package main

import (
	"image/color"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/text"
	"gonum.org/v1/plot/vg"
)

// drawn is a plot in a file.
type drawn struct{ title, file string }

var (
	mine   = color.RGBA{0x1f, 0x77, 0xb4, 0xff}
	others = color.RGBA{0xb0, 0xb0, 0xb0, 0xff}
)

const (
	width  = 7 * vg.Inch
	height = 3.5 * vg.Inch
)

// draw writes a plot of each thing that was measured.
func (r *results) draw(dir string) ([]drawn, error) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, err
	}
	var list []drawn
	for _, p := range []struct {
		drawn
		bars func() ([]string, []float64)
	}{
		{drawn{"ADD of one IPv4 pod, ms", "add-ipv4.svg"}, func() ([]string, []float64) {
			return r.adds("ipv4", "floor", "tombolo", "kindnet", "cni-kindnet", "reference")
		}},
		{drawn{"ADD of a dual-stack pod with host port, firewall and limits, ms", "add-everything.svg"}, func() ([]string, []float64) {
			return r.adds("everything", "floor", "tombolo", "names", "chain-nftables", "chain-iptables")
		}},
		{drawn{"Steps of an ADD in process, ms", "steps.svg"}, r.steps},
	} {
		names, values := p.bars()
		if len(values) == 0 {
			continue
		}
		if err := bars(p.title, filepath.Join(dir, p.file), names, values); err != nil {
			return nil, err
		}
		list = append(list, p.drawn)
	}
	if points := r.growth(); len(points) > 1 {
		p := drawn{"ADD in process by the pods that there are, ms", "pods.svg"}
		if err := line(p.title, filepath.Join(dir, p.file), points); err != nil {
			return nil, err
		}
		list = append(list, p)
	}
	return list, nil
}

// adds are the medians of contenders, in milliseconds.
func (r *results) adds(scenario string, contenders ...string) (names []string, values []float64) {
	for _, c := range contenders {
		if v, ok := r.get(compared(scenario, c), "ns/op"); ok {
			names, values = append(names, c), append(values, v/1e6)
		}
	}
	return names, values
}

// steps are those of an ADD, by the names that it logs.
func (r *results) steps() (names []string, values []float64) {
	for _, step := range []string{"open", "record", "ipam", "network", "link", "bandwidth", "firewall", "commit"} {
		if v, ok := r.get("Add/feature=everything", step+"-ns"); ok {
			names, values = append(names, step), append(values, v/1e6)
		}
	}
	return names, values
}

func (r *results) growth() plotter.XYs {
	var points plotter.XYs
	for _, pods := range r.under("Pods/pods=") {
		v, _ := r.get("Pods/pods="+pods, "ns/op")
		if n, err := strconv.Atoi(pods); err == nil {
			points = append(points, plotter.XY{X: float64(n), Y: v / 1e6})
		}
	}
	return points
}

// bars draws ours in a colour of their own, beside those of others.
func bars(title, file string, names []string, values []float64) error {
	p := plot.New()
	p.Title.Text = title
	p.Y.Min = 0
	for i, name := range names {
		bar, err := plotter.NewBarChart(plotter.Values{values[i]}, vg.Points(40))
		if err != nil {
			return err
		}
		bar.XMin, bar.Color, bar.LineStyle.Width = float64(i), others, 0
		if strings.HasPrefix(name, "tombolo") || strings.HasPrefix(filepath.Base(file), "steps") {
			bar.Color = mine
		}
		p.Add(bar)
	}
	labels, err := plotter.NewLabels(plotter.XYLabels{XYs: at(values), Labels: written(values)})
	if err != nil {
		return err
	}
	labels.Offset.Y = vg.Points(2)
	for i := range labels.TextStyle {
		labels.TextStyle[i].XAlign = text.XCenter
	}
	p.Add(labels)
	p.NominalX(names...)
	p.X.Min, p.X.Max = -0.6, float64(len(values))-0.4
	p.Y.Max = slices.Max(values) * 1.1
	return p.Save(width, height, file)
}

func at(values []float64) plotter.XYs {
	points := make(plotter.XYs, len(values))
	for i, v := range values {
		points[i] = plotter.XY{X: float64(i), Y: v}
	}
	return points
}

func written(values []float64) []string {
	list := make([]string, len(values))
	for i, v := range values {
		list[i] = digits(v)
	}
	return list
}

func line(title, file string, points plotter.XYs) error {
	p := plot.New()
	p.Title.Text = title
	p.X.Label.Text = "pods"
	p.Y.Min = 0
	l, dots, err := plotter.NewLinePoints(points)
	if err != nil {
		return err
	}
	l.Color, dots.Color = mine, mine
	p.Add(l, dots)
	return p.Save(width, height, file)
}
