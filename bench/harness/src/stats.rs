//! Medians, ratios and means.

/// Which way a figure is good.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Better {
    /// Throughput.
    Higher,
    /// Times.
    Lower,
}

/// The median of some values; of an even number, the mean of the two in the middle.
pub fn median(values: &[f64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let upper = *sorted.get(sorted.len() / 2)?;
    if sorted.len() % 2 == 1 { Some(upper) } else { Some(f64::midpoint(sorted[sorted.len() / 2 - 1], upper)) }
}

/// The smallest and the largest value.
pub fn spread(values: &[f64]) -> Option<[f64; 2]> {
    let least = values.iter().copied().min_by(f64::total_cmp)?;
    let most = values.iter().copied().max_by(f64::total_cmp)?;
    Some([least, most])
}

/// How many times better `ours` is than `theirs`; nothing where one of them did nothing.
pub fn ratio(ours: f64, theirs: f64, better: Better) -> Option<f64> {
    if !(ours > 0.0 && theirs > 0.0) {
        return None;
    }
    Some(match better {
        Better::Higher => ours / theirs,
        Better::Lower => theirs / ours,
    })
}

/// The geometric mean.
pub fn geometric_mean(values: impl IntoIterator<Item = f64>) -> Option<f64> {
    let (mut sum, mut count) = (0.0, 0_u32);
    for value in values {
        sum += value.ln();
        count += 1;
    }
    (count > 0).then(|| (sum / f64::from(count)).exp())
}

/// As many digits as a measurement deserves: four.
pub fn round(value: f64) -> f64 {
    if value == 0.0 || !value.is_finite() {
        return value;
    }
    let digits = 3.0 - value.abs().log10().floor();
    if digits <= 0.0 {
        return value.round();
    }
    let scale = 10_f64.powf(digits);
    (value * scale).round() / scale
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians() {
        assert_eq!(median(&[]), None);
        assert_eq!(median(&[3.0]), Some(3.0));
        assert_eq!(median(&[9.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(&[4.0, 1.0, 2.0, 100.0]), Some(3.0));
        assert_eq!(spread(&[9.0, 1.0, 2.0]), Some([1.0, 9.0]));
    }

    #[test]
    fn above_one_is_better_whatever_the_unit() {
        assert_eq!(ratio(200.0, 100.0, Better::Higher), Some(2.0));
        assert_eq!(ratio(50.0, 100.0, Better::Lower), Some(2.0));
        assert_eq!(ratio(0.0, 100.0, Better::Higher), None);
        assert_eq!(ratio(1.0, f64::NAN, Better::Lower), None);
    }

    #[test]
    fn means_of_ratios() {
        let mean = geometric_mean([0.5, 2.0, 8.0]).unwrap();
        assert!((mean - 2.0).abs() < 1e-9, "{mean}");
        assert_eq!(geometric_mean([]), None);
    }

    #[test]
    fn four_digits() {
        for (value, rounded) in [(0.0, 0.0), (1.23456, 1.235), (123_456.7, 123_457.0), (0.012_345, 0.012_35)] {
            assert!((round(value) - rounded).abs() < 1e-9, "{value}");
        }
    }
}
