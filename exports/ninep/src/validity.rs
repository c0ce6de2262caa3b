//! The validity period of a certificate, the only field of X.509 (RFC 5280, 4.1) that rustls does not expose.

/// Tags of DER (X.690, 8.1.2).
const SEQUENCE: u8 = 0x30;
const UTC_TIME: u8 = 0x17;
const GENERALIZED_TIME: u8 = 0x18;
/// The version of a certificate, which may be left out.
const VERSION: u8 = 0xa0;

const DAY_SECONDS: i64 = 86_400;

/// Reads one element: its tag and its content.
fn element<'a>(input: &mut &'a [u8]) -> Option<(u8, &'a [u8])> {
    let (&tag, rest) = input.split_first()?;
    let (&first, mut rest) = rest.split_first()?;
    let bytes = if first < 0x80 {
        usize::from(first)
    } else {
        let count = usize::from(first & 0x7f);
        // No certificate is longer than four bytes can express.
        let (digits, after) = rest.split_at_checked(count).filter(|_| (1..=4).contains(&count))?;
        rest = after;
        digits.iter().fold(0, |sum, digit| sum << 8 | usize::from(*digit))
    };
    let (content, after) = rest.split_at_checked(bytes)?;
    *input = after;
    Some((tag, content))
}

fn sequence<'a>(input: &mut &'a [u8]) -> Option<&'a [u8]> {
    element(input).filter(|(tag, _)| *tag == SEQUENCE).map(|(_, content)| content)
}

/// The first and last second of a certificate, since 1970.
pub(crate) fn of(mut certificate: &[u8]) -> Option<(i64, i64)> {
    let mut certificate = sequence(&mut certificate)?;
    let mut body = sequence(&mut certificate)?;
    if body.first() == Some(&VERSION) {
        element(&mut body)?;
    }
    // Serial number, algorithm, issuer.
    for _ in 0..3 {
        element(&mut body)?;
    }
    let mut times = sequence(&mut body)?;
    Some((time(element(&mut times)?)?, time(element(&mut times)?)?))
}

/// `YYMMDDHHMMSSZ` or `YYYYMMDDHHMMSSZ` (RFC 5280, 4.1.2.5).
fn time((tag, text): (u8, &[u8])) -> Option<i64> {
    let digits = text.strip_suffix(b"Z").filter(|digits| digits.iter().all(u8::is_ascii_digit))?;
    let pairs: Vec<i64> =
        digits.chunks_exact(2).map(|pair| i64::from(pair[0] - b'0') * 10 + i64::from(pair[1] - b'0')).collect();
    let (year, rest) = match (tag, &pairs[..]) {
        (UTC_TIME, [year, rest @ ..]) => (year + if *year < 50 { 2000 } else { 1900 }, rest),
        (GENERALIZED_TIME, [century, year, rest @ ..]) => (century * 100 + year, rest),
        _ => return None,
    };
    let &[month, day, hour, minute, second] = rest else { return None };
    let sound = (1..=12).contains(&month) && (1..=31).contains(&day) && hour < 24 && minute < 60 && second < 60;
    sound.then(|| days(year, month, day) * DAY_SECONDS + hour * 3600 + minute * 60 + second)
}

/// Days since 1970-01-01. Years begin in March here, so that the day that is not always there is the last.
fn days(year: i64, month: i64, day: i64) -> i64 {
    let year = if month <= 2 { year - 1 } else { year };
    let day_of_year = (153 * ((month + 9) % 12) + 2) / 5 + day - 1;
    year * 365 + year.div_euclid(4) - year.div_euclid(100) + year.div_euclid(400) + day_of_year - 719_468
}

/// A day, for people.
pub(crate) fn shown(seconds: i64) -> String {
    let target = seconds.div_euclid(DAY_SECONDS);
    let year = (1..).map(|after| 1970 + after).find(|year| days(*year, 1, 1) > target).unwrap_or(1971) - 1;
    let month = (2..=12).find(|month| days(year, *month, 1) > target).unwrap_or(13) - 1;
    format!("{year:04}-{month:02}-{:02}", target - days(year, month, 1) + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read_and_shown() {
        for (tag, text, seconds, day) in [
            (UTC_TIME, "700101000000Z", 0, "1970-01-01"),
            (UTC_TIME, "240229235959Z", 1_709_251_199, "2024-02-29"),
            (UTC_TIME, "491231235959Z", 2_524_607_999, "2049-12-31"),
            (GENERALIZED_TIME, "20500301000000Z", 2_529_705_600, "2050-03-01"),
            (GENERALIZED_TIME, "20260101123456Z", 1_767_270_896, "2026-01-01"),
        ] {
            assert_eq!(time((tag, text.as_bytes())), Some(seconds), "{text}");
            assert_eq!(shown(seconds), day, "{text}");
        }
        for (tag, text) in [
            (UTC_TIME, "7001010000Z"),
            (UTC_TIME, "700101000000+0100"),
            (UTC_TIME, "701301000000Z"),
            (GENERALIZED_TIME, "700101000000Z"),
            (2, "700101000000Z"),
            (UTC_TIME, ""),
        ] {
            assert_eq!(time((tag, text.as_bytes())), None, "{text}");
        }
    }

    #[test]
    fn invalid_certificates_have_no_times() {
        for bytes in
            [&b""[..], b"\x30", b"\x30\x80", b"\x30\x84\xff\xff\xff\xff", b"\x30\x02\x30\x00", &[0x30; 40], &[0xa0; 40]]
        {
            assert_eq!(of(bytes), None, "{bytes:?}");
        }
    }
}
