//! Curves of IOPS over threads, in SVG.

use std::fmt::Write as _;

const LEFT: f64 = 70.0;
const TOP: f64 = 70.0;
const PLOT_WIDTH: f64 = 460.0;
const PLOT_HEIGHT: f64 = 430.0;
/// Room for the names of the curves.
const NAMES_WIDTH: f64 = 190.0;
/// Names nearer to each other than this cannot be read.
const NAME_HEIGHT: f64 = 14.0;
const WIDTH: f64 = LEFT + PLOT_WIDTH + NAMES_WIDTH;
const HEIGHT: f64 = TOP + PLOT_HEIGHT + 50.0;

/// A curve.
#[derive(Debug, Clone)]
pub struct Curve {
    /// Its name.
    pub name: String,
    /// Ours stand out.
    pub ours: bool,
    /// Threads, and requests per second.
    pub points: Vec<(f64, f64)>,
}

/// Colors that can be told from each other, also by those who see fewer.
const COLORS: [&str; 7] = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#6a3d9a", "#b8860b", "#444444"];

/// The curves, with a logarithmic scale of rates: what is twice as fast is equally far above everywhere.
pub fn svg(title: &str, curves: &[Curve]) -> String {
    let points = || curves.iter().flat_map(|curve| curve.points.iter().copied());
    let most_threads = points().fold(2.0, |most: f64, (threads, _)| most.max(threads));
    let rates = points().map(|(_, rate)| rate).filter(|rate| *rate > 0.0);
    let (low, high) = rates.fold((f64::INFINITY, 0.0), |(low, high): (f64, f64), rate| (low.min(rate), high.max(rate)));
    let (low, high) = if high > 0.0 { (low.log2().floor(), high.log2().ceil()) } else { (0.0, 1.0) };
    let high = high.max(low + 1.0);
    let x = |threads: f64| LEFT + (threads - 1.0) / (most_threads - 1.0) * PLOT_WIDTH;
    let y = |rate: f64| TOP + (high - rate.max(1.0).log2()) / (high - low) * PLOT_HEIGHT;

    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{HEIGHT}\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" \
         font-family=\"sans-serif\" font-size=\"12\" fill=\"#222\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n\
         <text x=\"12\" y=\"24\" font-size=\"16\" font-weight=\"bold\">{}</text>\n\
         <text x=\"12\" y=\"44\">thousand requests per second (logarithmic scale) over threads; medians</text>\n",
        escape(title)
    );
    grid(&mut out, (low, high), most_threads, &x, &y);
    let mut names: Vec<(f64, usize)> = Vec::new();
    for (number, curve) in curves.iter().enumerate() {
        let color = COLORS[number % COLORS.len()];
        let (width, dashes) = if curve.ours { (2.5, "") } else { (1.5, " stroke-dasharray=\"5 3\"") };
        let line: Vec<String> =
            curve.points.iter().map(|&(threads, rate)| format!("{:.1},{:.1}", x(threads), y(rate))).collect();
        let _ = writeln!(
            out,
            "<polyline points=\"{}\" fill=\"none\" stroke=\"{color}\" stroke-width=\"{width}\"{dashes}/>",
            line.join(" ")
        );
        for &(threads, rate) in &curve.points {
            let _ =
                writeln!(out, "<circle cx=\"{:.1}\" cy=\"{:.1}\" r=\"2.5\" fill=\"{color}\"/>", x(threads), y(rate));
        }
        if let Some(&(_, rate)) = curve.points.last() {
            names.push((y(rate), number));
        }
    }
    for (at, number) in spread(names) {
        let curve = &curves[number];
        let weight = if curve.ours { " font-weight=\"bold\"" } else { "" };
        let _ = writeln!(
            out,
            "<text x=\"{:.1}\" y=\"{:.1}\" fill=\"{}\"{weight}>{}</text>",
            LEFT + PLOT_WIDTH + 10.0,
            at + 4.0,
            COLORS[number % COLORS.len()],
            escape(&curve.name)
        );
    }
    out.push_str("</svg>\n");
    out
}

fn grid(out: &mut String, (low, high): (f64, f64), most_threads: f64, x: &dyn Fn(f64) -> f64, y: &dyn Fn(f64) -> f64) {
    // Round figures: 1, 2 and 5 times each power of ten.
    let rates = (0..10).flat_map(|power| [1.0, 2.0, 5.0].map(|step| step * 10_f64.powi(power)));
    for rate in rates.filter(|rate| (low..=high).contains(&rate.log2())) {
        let at = y(rate);
        let _ = writeln!(
            out,
            "<line x1=\"{LEFT}\" x2=\"{:.1}\" y1=\"{at:.1}\" y2=\"{at:.1}\" stroke=\"#ddd\"/>\
             <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
            LEFT + PLOT_WIDTH,
            LEFT - 8.0,
            at + 4.0,
            rate / 1000.0
        );
    }
    let mut threads = 1.0;
    while threads <= most_threads {
        let at = x(threads);
        let bottom = TOP + PLOT_HEIGHT;
        let _ = writeln!(
            out,
            "<line x1=\"{at:.1}\" x2=\"{at:.1}\" y1=\"{TOP}\" y2=\"{bottom:.1}\" stroke=\"#eee\"/>\
             <text x=\"{at:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{threads}</text>",
            bottom + 18.0
        );
        threads += 1.0;
    }
    let _ = writeln!(
        out,
        "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">threads</text>",
        LEFT + PLOT_WIDTH / 2.0,
        HEIGHT - 12.0
    );
}

/// Moves names down until none lies on another, and all up again if the last then left the picture.
fn spread(mut names: Vec<(f64, usize)>) -> Vec<(f64, usize)> {
    names.sort_by(|(a, _), (b, _)| a.total_cmp(b));
    let mut above = f64::NEG_INFINITY;
    for (at, _) in &mut names {
        *at = at.max(above + NAME_HEIGHT);
        above = *at;
    }
    let mut below = TOP + PLOT_HEIGHT + NAME_HEIGHT;
    for (at, _) in names.iter_mut().rev() {
        *at = at.min(below - NAME_HEIGHT);
        below = *at;
    }
    names
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draws_a_line_for_each_curve() {
        let curve = |name: &str, ours| Curve {
            name: name.into(),
            ours,
            points: vec![(1.0, 100_000.0), (4.0, 250_000.0), (8.0, 400_000.0)],
        };
        let text = svg("a & b", &[curve("one", true), curve("two", false)]);
        assert_eq!((text.matches("<polyline").count(), text.matches("<circle").count()), (2, 6));
        assert!(text.contains("a &amp; b") && text.contains(">one<") && text.contains(">8<"));
        assert_eq!(text.matches("<text").count(), text.matches("</text>").count());
        assert!(!svg("none", &[]).contains("NaN"));
    }

    #[test]
    fn names_do_not_lie_on_each_other() {
        let bottom = TOP + PLOT_HEIGHT;
        let spread = spread(vec![(bottom, 0), (bottom, 1), (bottom - 3.0, 2), (TOP, 3)]);
        assert_eq!(spread.iter().map(|(_, number)| *number).collect::<Vec<_>>(), [3, 2, 0, 1]);
        assert!(spread.windows(2).all(|pair| pair[1].0 - pair[0].0 >= NAME_HEIGHT), "{spread:?}");
        assert!(spread.last().unwrap().0 <= bottom);
    }
}
