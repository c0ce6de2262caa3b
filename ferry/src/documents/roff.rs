//! What the generator of man pages lacks.

/// Returns the page with its title line in place of the generator's: that one does not quote the empty date, so that the version is
/// taken for it.
pub fn titled(name: &str, section: &str, page: &[u8]) -> Vec<u8> {
    let title = format!(".TH \"{name}\" \"{section}\" \"\" \"ferry {}\" \"Ferry\"\n", env!("CARGO_PKG_VERSION"));
    let text = String::from_utf8_lossy(page);
    let rest = text.split_inclusive('\n').filter(|line| !line.starts_with(".TH "));
    std::iter::once(title.as_str()).chain(rest).collect::<String>().into_bytes()
}

/// Returns a section of a man page whose lines are not filled.
pub fn verbatim(title: &str, text: &str) -> String {
    if text.is_empty() {
        return String::new();
    }
    let mut section = format!(".SH {title}\n.nf\n");
    for line in text.lines() {
        // Keeps dashes as typed; a leading dot is not a request.
        let line = line.replace('\\', "\\e").replace('-', "\\-");
        section.push_str("\\&");
        section.push_str(&line);
        section.push('\n');
    }
    section + ".fi\n"
}
