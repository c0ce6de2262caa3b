//! The ratios as a bar chart, in SVG.

use std::fmt::Write as _;

use crate::line::Line;

const ROW_HEIGHT: f64 = 20.0;
const BAR_HEIGHT: f64 = 13.0;
const TOP: f64 = 70.0;
const NAMES_WIDTH_MIN: f64 = 240.0;
/// Of a character, at most and on average.
const CHARACTER_WIDTH: f64 = 6.6;
const BARS_WIDTH: f64 = 560.0;
const RIGHT: f64 = 70.0;

/// The ratios of `lines` to `peer`, on a logarithmic scale: half as good is as far from 1 as twice as good.
pub fn svg(lines: &[Line], peer: &str) -> String {
    let bars: Vec<(String, f64)> = lines
        .iter()
        .filter_map(|line| Some((format!("{} ({})", line.row, line.config), *line.ratio.get(peer)?)))
        .collect();
    let longest = bars.iter().map(|(name, _)| u32::try_from(name.chars().count()).unwrap_or(0)).max().unwrap_or(0);
    let names_width = (f64::from(longest) * CHARACTER_WIDTH + 20.0).max(NAMES_WIDTH_MIN);
    let width = names_width + BARS_WIDTH + RIGHT;
    let powers = bars.iter().map(|(_, ratio)| ratio.log2());
    let (low, high) = powers.fold((-1.0_f64, 1.0_f64), |(low, high), power| (low.min(power), high.max(power)));
    let (low, high) = (low.floor(), high.ceil());
    let x = |power: f64| names_width + (power - low) / (high - low) * BARS_WIDTH;
    let rows = u32::try_from(bars.len()).unwrap_or(u32::MAX);
    let bottom = TOP + f64::from(rows) * ROW_HEIGHT;

    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" viewBox=\"0 0 {width} {height}\" \
         font-family=\"sans-serif\" font-size=\"12\" fill=\"#222\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n\
         <text x=\"12\" y=\"24\" font-size=\"16\" font-weight=\"bold\">How many times better Ferry is than {peer}</text>\n\
         <text x=\"12\" y=\"42\">medians; to the right of the line at 1 Ferry is better; logarithmic scale</text>\n",
        height = bottom + 16.0,
        peer = escape(peer),
    );
    let mut power = low;
    while power <= high {
        let (at, line) = (x(power), if power == 0.0 { "#222" } else { "#ddd" });
        let _ = writeln!(
            out,
            "<line x1=\"{at:.1}\" x2=\"{at:.1}\" y1=\"{:.1}\" y2=\"{bottom:.1}\" stroke=\"{line}\"/>\
             <text x=\"{at:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>",
            TOP - 4.0,
            TOP - 9.0,
            power.exp2()
        );
        power += 1.0;
    }
    let mut y = TOP;
    for (name, ratio) in &bars {
        let (one, end) = (x(0.0), x(ratio.log2()));
        let color = if *ratio < 1.0 { "#c2573a" } else { "#3a7ca5" };
        let middle = y + ROW_HEIGHT / 2.0 + 4.0;
        let _ = writeln!(
            out,
            "<text x=\"{:.1}\" y=\"{middle:.1}\" text-anchor=\"end\">{}</text>\
             <rect x=\"{:.1}\" y=\"{:.1}\" width=\"{:.1}\" height=\"{BAR_HEIGHT}\" fill=\"{color}\"/>\
             <text x=\"{:.1}\" y=\"{middle:.1}\">{ratio:.2}</text>",
            names_width - 10.0,
            escape(name),
            one.min(end),
            y + (ROW_HEIGHT - BAR_HEIGHT) / 2.0,
            (end - one).abs().max(1.0),
            one.max(end) + 5.0,
        );
        y += ROW_HEIGHT;
    }
    out.push_str("</svg>\n");
    out
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rows;

    #[test]
    fn draws_a_bar_for_each_ratio() {
        let rows = rows::all();
        let mut lines: Vec<Line> = rows.iter().take(3).map(|row| Line::empty("virtiofs", row)).collect();
        lines[0].ratio.insert("virtiofsd".into(), 3.0);
        lines[1].ratio.insert("virtiofsd".into(), 0.5);
        let text = svg(&lines, "virtiofsd");
        // The background and two bars: the third line has no ratio.
        assert_eq!(text.matches("<rect").count(), 3);
        assert!(text.contains(">3.00<") && text.contains(">0.50<") && text.contains("seqread-psync (none)"));
        assert_eq!(text.matches("<text").count(), text.matches("</text>").count());
    }
}
