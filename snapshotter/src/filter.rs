//! containerd's filters: which snapshots `List` returns.
//!
//! ```text
//! filter   = selector *("," selector)              all of them must match
//! selector = path [("==" | "!=") value]            without an operator: the field is present
//!          | path "~=" (value | pattern)           a regular expression matches a part of the field
//! path     = "name" | "parent" | "kind" | "labels" 1*("." field)
//! field    = 1*(letter | digit | "_") | quoted
//! value    = quoted | a run of characters other than "," and spaces
//! quoted   = a string of Go in double quotes
//! pattern  = the same between two "/" or two "|", with that quote as an escape
//! ```
//!
//! A snapshot is listed if one of the filters matches, or there is none. Fields that snapshots do not have are refused. So are
//! expressions that cannot be compiled, of which containerd says that they match nothing.
//!
//! As in Go, `\w`, `\d`, `\s` and `\b` are of ASCII, and a match takes time in proportion to the expression and the value. Classes by
//! Unicode property (`\pL`) are not known.

use regex_lite::{Regex, RegexBuilder};

use crate::api::{Info, Kind};
use crate::error::{Error, Result};

/// The maximum length of a filter in bytes: containerd's own name a label and a digest.
pub const FILTER_BYTES_MAX: usize = 16 << 10;
/// The maximum number of filters in a call.
pub const FILTERS_MAX: usize = 1024;
/// The maximum number of regular expressions in a call: each is matched with each snapshot.
pub const PATTERNS_MAX: usize = 16;
/// The maximum size of a compiled expression in bytes: some hundred states, of which each may be visited for each byte of a value.
const PATTERN_BYTES_MAX: usize = 32 << 10;
/// The maximum depth of groups in an expression.
const PATTERN_DEPTH_MAX: u32 = 16;

/// Selects snapshots.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Filter {
    /// One must match, unless there is none.
    any: Vec<Vec<Selector>>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Selector {
    field: Field,
    condition: Condition,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Field {
    Name,
    Parent,
    Kind,
    Label(String),
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Condition {
    Present,
    Equal(String),
    NotEqual(String),
    Matches(Pattern),
}

/// A compiled regular expression.
#[derive(Clone, Debug)]
struct Pattern(Regex);

impl Pattern {
    fn new(text: &str) -> Parsed<Self> {
        let mut builder = RegexBuilder::new(text);
        let built = builder.size_limit(PATTERN_BYTES_MAX).nest_limit(PATTERN_DEPTH_MAX).build();
        built.map(Self).map_err(|error| format!("the regular expression {text:?} cannot be used: {error}"))
    }
}

impl PartialEq for Pattern {
    fn eq(&self, other: &Self) -> bool {
        self.0.as_str() == other.0.as_str()
    }
}

impl Eq for Pattern {}

impl Filter {
    /// Parses the filters of a call.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`], with the filter and what is not known in it.
    pub fn parse<S: AsRef<str>>(filters: &[S]) -> Result<Self> {
        if filters.len() > FILTERS_MAX {
            let count = filters.len();
            return Err(Error::InvalidArgument(format!("{count} filters are too many: {FILTERS_MAX} are possible")));
        }
        let mut patterns = 0;
        let parsed = filters.iter().map(|filter| {
            let text = filter.as_ref();
            if text.len() > FILTER_BYTES_MAX {
                let bytes = text.len();
                return Err(Error::InvalidArgument(format!(
                    "a filter of {bytes} bytes is too long: {FILTER_BYTES_MAX} are possible"
                )));
            }
            let mut parser = Parser { text, at: 0, patterns: &mut patterns };
            parser.selectors().map_err(|why| {
                Error::InvalidArgument(format!("the filter {text:?} is not understood at byte {}: {why}", parser.at))
            })
        });
        Ok(Self { any: parsed.collect::<Result<_>>()? })
    }

    /// Whether there are regular expressions, which take longer than comparisons.
    pub(crate) fn has_patterns(&self) -> bool {
        self.any.iter().flatten().any(|selector| matches!(selector.condition, Condition::Matches(_)))
    }

    /// Whether a snapshot is selected.
    #[must_use]
    pub fn matches(&self, info: &Info) -> bool {
        self.any.is_empty() || self.any.iter().any(|all| all.iter().all(|selector| selector.matches(info)))
    }
}

impl Selector {
    fn matches(&self, info: &Info) -> bool {
        let value = match &self.field {
            Field::Name => Some(&*info.name),
            Field::Parent => Some(&*info.parent),
            Field::Kind => match info.kind() {
                Kind::Active => Some("active"),
                Kind::View => Some("view"),
                Kind::Committed => Some("committed"),
                Kind::Unknown => None,
            },
            Field::Label(name) => info.labels.get(name).map(String::as_str),
        };
        match &self.condition {
            Condition::Present => value.is_some(),
            Condition::Equal(wanted) => value == Some(wanted),
            // As in containerd, a missing label is compared and matched as an empty one.
            Condition::NotEqual(wanted) => value.unwrap_or_default() != wanted,
            Condition::Matches(Pattern(pattern)) => pattern.is_match(value.unwrap_or_default()),
        }
    }
}

struct Parser<'a> {
    text: &'a str,
    at: usize,
    /// The number of regular expressions in the call.
    patterns: &'a mut usize,
}

type Parsed<T> = std::result::Result<T, String>;

impl<'a> Parser<'a> {
    fn rest(&self) -> &'a str {
        &self.text[self.at..]
    }

    fn skip_spaces(&mut self) {
        self.at += self.rest().len() - self.rest().trim_start().len();
    }

    fn next_is(&mut self, token: &str) -> bool {
        self.skip_spaces();
        let found = self.rest().starts_with(token);
        if found {
            self.at += token.len();
        }
        found
    }

    /// Takes the longest run of characters for which `belongs` holds.
    fn take(&mut self, belongs: impl Fn(char) -> bool) -> &'a str {
        let rest = self.rest();
        let end = rest.find(|c| !belongs(c)).unwrap_or(rest.len());
        self.at += end;
        &rest[..end]
    }

    fn selectors(&mut self) -> Parsed<Vec<Selector>> {
        self.skip_spaces();
        if self.rest().is_empty() {
            return Ok(Vec::new());
        }
        let mut selectors = vec![self.selector()?];
        while self.next_is(",") {
            selectors.push(self.selector()?);
        }
        match self.rest().chars().next() {
            None => Ok(selectors),
            Some(found) => Err(format!("a comma or the end is expected, not {found:?}")),
        }
    }

    fn selector(&mut self) -> Parsed<Selector> {
        let field = self.path()?;
        self.skip_spaces();
        let operator = self.take(|c| "=!~".contains(c));
        let condition = match operator {
            "" => Condition::Present,
            "==" => Condition::Equal(self.value()?),
            "!=" => Condition::NotEqual(self.value()?),
            "~=" => Condition::Matches(self.pattern()?),
            other => return Err(format!("the operator {other} is not known: ==, != and ~= are")),
        };
        Ok(Selector { field, condition })
    }

    fn path(&mut self) -> Parsed<Field> {
        let mut parts = vec![self.field()?];
        while self.next_is(".") {
            parts.push(self.field()?);
        }
        match (&*parts[0], &parts[1..]) {
            ("name", []) => Ok(Field::Name),
            ("parent", []) => Ok(Field::Parent),
            ("kind", []) => Ok(Field::Kind),
            ("labels", [_, ..]) => Ok(Field::Label(parts[1..].join("."))),
            _ => {
                let path = parts.join(".");
                Err(format!("snapshots have no field {path}: name, parent, kind and labels.NAME are known"))
            }
        }
    }

    fn field(&mut self) -> Parsed<String> {
        self.skip_spaces();
        if self.rest().starts_with('"') {
            return self.quoted('"');
        }
        let field = self.take(|c| c.is_ascii_alphanumeric() || c == '_');
        if field.is_empty() { Err("the name of a field is expected".into()) } else { Ok(field.into()) }
    }

    fn value(&mut self) -> Parsed<String> {
        self.skip_spaces();
        match self.rest().chars().next() {
            None | Some(',') => Err("a value is expected".into()),
            Some('"') => self.quoted('"'),
            Some(quote @ ('/' | '|')) => Err(format!("the quote {quote} is for regular expressions (~=)")),
            Some(_) => Ok(self.take(|c| c != ',' && !c.is_whitespace() && !c.is_control()).into()),
        }
    }

    fn pattern(&mut self) -> Parsed<Pattern> {
        *self.patterns += 1;
        if *self.patterns > PATTERNS_MAX {
            return Err(format!("more than {PATTERNS_MAX} regular expressions are too many"));
        }
        self.skip_spaces();
        let text = match self.rest().chars().next() {
            Some(quote @ ('/' | '|')) => self.quoted(quote)?,
            _ => self.value()?,
        };
        Pattern::new(&text)
    }

    /// Reads a string in quotes, with the escapes of Go.
    fn quoted(&mut self, quote: char) -> Parsed<String> {
        let unterminated = || "a quoted string does not end".to_owned();
        self.at += 1;
        let mut bytes = Vec::new();
        loop {
            let next = self.rest().chars().next().filter(|c| *c != '\n').ok_or_else(unterminated)?;
            self.at += next.len_utf8();
            match next {
                end if end == quote => break,
                '\\' => self.escape(quote, &mut bytes)?,
                other => bytes.extend(other.encode_utf8(&mut [0; 4]).bytes()),
            }
        }
        String::from_utf8(bytes).map_err(|_| "a quoted string is not UTF-8".into())
    }

    fn escape(&mut self, quote: char, bytes: &mut Vec<u8>) -> Parsed<()> {
        let next = self.rest().chars().next().ok_or("a quoted string ends with \\")?;
        let (radix, count) = match next {
            'x' => (16, 2),
            'u' => (16, 4),
            'U' => (16, 8),
            '0'..='7' => (8, 3),
            _ => {
                let byte = match next {
                    'a' => 7,
                    'b' => 8,
                    'f' => 12,
                    'n' => b'\n',
                    'r' => b'\r',
                    't' => b'\t',
                    'v' => 11,
                    '\\' => b'\\',
                    '"' if quote == '"' => b'"',
                    '/' if quote == '/' => b'/',
                    '|' if quote == '|' => b'|',
                    _ => return Err(format!("the escape \\{next} is not known")),
                };
                self.at += 1;
                bytes.push(byte);
                return Ok(());
            }
        };
        let start = self.at + usize::from(radix == 16);
        let digits = self.text.get(start..start + count).filter(|digits| digits.chars().all(|c| c.is_digit(radix)));
        let digits = digits.ok_or_else(|| format!("the escape \\{next} needs {count} digits"))?;
        let code = u32::from_str_radix(digits, radix).map_err(|error| error.to_string())?;
        self.at = start + count;
        if matches!(next, 'u' | 'U') {
            let c = char::from_u32(code).ok_or_else(|| format!("\\{next}{digits} is no character"))?;
            bytes.extend(c.encode_utf8(&mut [0; 4]).bytes());
        } else {
            bytes.push(u8::try_from(code).map_err(|_| format!("\\{digits} is no byte"))?);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn info(name: &str, kind: Kind, parent: &str, labels: &[(&str, &str)]) -> Info {
        let labels = labels.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        Info { name: name.into(), parent: parent.into(), kind: kind.into(), labels, ..Info::default() }
    }

    #[test]
    fn filters_select_as_in_containerd() {
        let reference = "containerd.io/snapshot.ref";
        let snapshots = [
            info("a", Kind::Active, "p", &[("l", "2"), ("x.y", "1")]),
            info("p", Kind::Committed, "", &[(reference, "sha256:12")]),
            info("v", Kind::View, "p", &[]),
        ];
        for (filters, expected) in [
            (&[][..], "apv"),
            (&[""], "apv"),
            (&["name==p", "name==a"], "ap"),
            (&["kind==active,labels.l==2"], "a"),
            (&["kind == active , labels.l"], "a"),
            (&["labels.l"], "a"),
            (&["labels.x.y==1"], "a"),
            (&["parent!=\"\""], "av"),
            (&["parent==\"p\""], "av"),
            (&["labels.l!=2"], "pv"),
            (&["labels.\"containerd.io/snapshot.ref\"==sha256:12,parent==\"\""], "p"),
            (&["labels.\"containerd.io\\x2fsnapshot.ref\"==\"sha256\\u003a12\""], "p"),
            (&["name==\"\\141\""], "a"),
            (&["kind==view", "name"], "apv"),
            (&["name~=^[a-p]$"], "ap"),
            (&["name ~= /^(a|v)$/ , parent"], "av"),
            (&["labels.\"containerd.io/snapshot.ref\"~=|^sha256:\\\\d+$|"], "p"),
            (&["labels.\"containerd.io/snapshot.ref\"~=\"^SHA256:|x\"", "kind~=(?i)^VI"], "v"),
            (&["labels.l~=/^$/"], "pv"),
            (&["labels.x.y~=/\\/|1/"], "a"),
            (&["name~=é|a"], "a"),
        ] {
            let filter = Filter::parse(filters).expect("it is a filter");
            let found: String = snapshots.iter().filter(|info| filter.matches(info)).map(|info| &*info.name).collect();
            assert_eq!(found, expected, "{filters:?}");
        }
    }

    #[test]
    fn what_is_not_understood_is_named() {
        for (filter, why) in [
            ("size==1", "no field size"),
            ("labels", "no field labels"),
            ("name.x==1", "no field name.x"),
            ("name~=/a.*", "does not end"),
            ("name~=", "a value is expected"),
            ("name~=/a\\.b/", "the escape \\. is not known"),
            ("name~=/a\\|b/", "the escape \\| is not known"),
            ("name~=(a", "cannot be used"),
            ("name~=\\pL", "cannot be used"),
            ("name~=/((a{1000}){1000}){1000}/", "cannot be used"),
            ("name~=/((((((((((((((((((a))))))))))))))))))/", "cannot be used"),
            ("name==/a/", "the quote /"),
            ("name=a", "the operator = is not known"),
            ("name===a", "the operator === is not known"),
            ("name==", "a value is expected"),
            ("name==,parent", "a value is expected"),
            ("name==a b", "a comma or the end is expected, not 'b'"),
            ("name==a,", "the name of a field is expected"),
            ("labels.a-b", "a comma or the end is expected, not '-'"),
            ("name==\"a", "does not end"),
            ("name==\"\\q\"", "the escape \\q is not known"),
            ("name==\"\\x4\"", "needs 2 digits"),
            ("name==\"\\777\"", "is no byte"),
            ("name==\"\\xff\"", "is not UTF-8"),
            ("name==\"\\ud800\"", "is no character"),
        ] {
            let error = Filter::parse(&[filter]).expect_err(filter);
            assert!(matches!(error, Error::InvalidArgument(_)) && error.to_string().contains(why), "{filter}: {error}");
        }
        assert!(Filter::parse(&["x".repeat(FILTER_BYTES_MAX + 1)]).is_err());
        assert!(Filter::parse(&vec!["name"; FILTERS_MAX + 1]).is_err());
        assert!(Filter::parse(&["name~=a"; PATTERNS_MAX]).is_ok());
        assert!(Filter::parse(&["name~=a"; PATTERNS_MAX + 1]).is_err());
    }

    /// A matcher that backtracks takes exponential time for each of these.
    #[test]
    fn hostile_expressions_take_little_time() {
        let info = info(&"a".repeat(4096), Kind::Active, "", &[]);
        let begin = std::time::Instant::now();
        let mut compiled = 0;
        for pattern in [
            "(a*)*b",
            "(a|a)*b",
            "(a?){100}a{100}b",
            "(a|aa)+$b",
            "(.*)(.*)(.*)(.*)(.*)(.*)b",
            "((a*)*)*b",
            "(){1000}b",
        ] {
            let Ok(filter) = Filter::parse(&[format!("name~=\"{pattern}\"")]) else { continue };
            assert!(filter.has_patterns() && !filter.matches(&info), "{pattern}");
            compiled += 1;
        }
        assert!(compiled >= 5, "{compiled}");
        // In a guest without KVM, too.
        assert!(begin.elapsed() < std::time::Duration::from_secs(60), "{:?}", begin.elapsed());
        for empty in ["(){1000}{1000}{1000}", "(?:){1000}{1000}{1000}{1000}", "(?:(?:a{0}){1000}){1000}{1000}"] {
            assert!(Filter::parse(&[format!("name~=\"{empty}\"")]).is_err(), "{empty}");
        }
    }

    proptest! {
        #[test]
        fn every_text_is_parsed_or_refused(text in "([a-z.\"\\\\=!~,/ xuU0-9é]{0,40}|name~=[a(){}0-9*|,?+\\[\\]^\"/\\\\-]{0,40})") {
            let _ = Filter::parse(&[text]);
        }

        #[test]
        fn quoted_values_are_read_as_written(name in "[ -~é]{1,20}", value in "\\PC{0,20}") {
            let go = |text: &str| text.replace('\\', "\\\\").replace('"', "\\\"");
            let filter = Filter::parse(&[format!("labels.\"{}\"==\"{}\"", go(&name), go(&value))]).unwrap();
            prop_assert!(filter.matches(&info("", Kind::View, "", &[(&name, &value)])));
            prop_assert!(!filter.matches(&info("", Kind::View, "", &[(&name, "other than that")])));
        }
    }
}
