//! Plans of changes, from configuration files and command lines.

use super::*;

fn file(text: &str) -> config::File {
    config::parse(text, Path::new("/etc/ferry")).expect(text)
}

/// The processes of a file, as at the start.
fn units(text: &str) -> Vec<Unit> {
    let config::File { shares, share_tables, disks, disk_tables, .. } = file(text);
    let shares = shares.into_iter().zip(share_tables.into_iter().map(Some)).collect();
    let flags = SandboxFlags::default();
    let disks = disks.into_iter().zip(disk_tables).map(|(disk, table)| Unit::of_disk(disk, Some(table), &flags));
    Unit::of_shares(shares, &flags).into_iter().chain(disks).collect()
}

fn served(units: &[Unit]) -> Vec<RunningServer<'_>> {
    units.iter().enumerate().map(|(index, unit)| RunningServer::new(index, unit)).collect()
}

/// What a plan does, in words.
fn described(plan: &Plan, units: &[Unit]) -> String {
    let mut words: Vec<_> = plan.starts.iter().map(|unit| format!("start {}", unit.shown())).collect();
    words.extend(plan.replaces.iter().map(|one| format!("{} changes to {}", one.keys, one.unit.shown())));
    words.extend(plan.level.iter().map(|level| format!("log {}", level_setting(level.as_ref()).value)));
    words.extend(plan.ends.iter().map(|index| format!("end {}", units[*index].shown())));
    for ItemSettings { server, item, settings, undo } in &plan.settings {
        for (now, then) in settings.iter().zip(undo) {
            words.push(format!("{} {}={} not {}", name_of(&units[*server], *item), now.name, now.value, then.value));
        }
    }
    words.join("; ")
}

fn planned(before: &str, after: &str) -> Result<String> {
    let units = units(before);
    let base = Base { level: Some(file(before).log), ..Base::default() };
    Ok(described(&reload(file(after), &served(&units), &base)?, &units))
}

const A: &str = "[[share]]\nsource = \"/a\"\nvirtiofs = \"a\"\n";
const B: &str = "[[share]]\nsource = \"/b\"\nvirtiofs = \"b\"\n";
const D: &str = "[[disk]]\nfile = \"d\"\nvhost-user = \"d\"\n";

fn memory(place: &str, more: &str) -> String {
    format!("[[share]]\nsource = \"mem\"\nvirtiofs = \"{place}\"\n{more}")
}

#[test]
fn a_reload_plans_the_difference() {
    let default = Share::default().poll().get().as_micros();
    for (before, after, expected) in [
        (A.into(), A.into(), String::new()),
        (format!("{A}{B}"), format!("{B}{A}"), String::new()),
        (A.into(), A.replace("source", "dir"), String::new()),
        (A.into(), format!("{A}{B}{D}"), "start /b; start /etc/ferry/d".into()),
        (format!("{A}{B}{D}"), B.into(), "end /a; end /etc/ferry/d".into()),
        (A.into(), B.into(), "start /b; end /a".into()),
        (format!("{A}limit = \"iops=5\""), A.into(), "/a limit=none not iops=5".into()),
        (A.into(), format!("{A}limit = \"bps=1M\""), "/a limit=bps=1048576 not none".into()),
        (
            format!("{A}limit = \"iops=5,group=g\""),
            format!("{A}limit = \"iops=6,group=g\""),
            "/a limit=iops=6 not iops=5".into(),
        ),
        (format!("{A}poll-us = 0"), A.into(), format!("/a poll-us={default} not 0")),
        (A.into(), format!("{A}attr-timeout = 5"), "/a attr-timeout=5 not default".into()),
        (D.into(), format!("{D}limit = \"iops=7\""), "/etc/ferry/d limit=iops=7 not none".into()),
        (format!("log = \"warn\"\n{A}"), A.into(), "log info".into()),
        (A.into(), format!("log = \"debug\"\n{B}{A}"), "start /b; log debug".into()),
        // Other flags need another server.
        (
            A.into(),
            format!("{A}cache = \"none\"\ntag = \"x\""),
            "cache, tag of /a at /etc/ferry/a changes to /a".into(),
        ),
        (format!("{A}read-only = true"), A.into(), "read-only of /a at /etc/ferry/a changes to /a".into()),
        (A.into(), A.replace("/a", "/b"), "source of /a at /etc/ferry/a changes to /b".into()),
        (A.into(), format!("{A}9p = \"unix:c\""), "9p of /a at /etc/ferry/a, /etc/ferry/c changes to /a".into()),
        (
            D.into(),
            format!("{A}{D}read-only = true"),
            "start /a; read-only of /etc/ferry/d at /etc/ferry/d changes to /etc/ferry/d".into(),
        ),
        (
            D.into(),
            "[[share]]\nsource = \"/a\"\nvirtiofs = \"d\"\n".into(),
            "file, source, vhost-user, virtiofs of /etc/ferry/d at /etc/ferry/d changes to /a".into(),
        ),
        // Memory with other flags is another tree.
        (memory("a", ""), memory("a", "") + &memory("b", "size = \"1G\"\n"), "start mem".into()),
        // A group may go and come as a whole.
        (format!("{A}limit = \"iops=5,group=g\"\n{B}limit = \"iops=5,group=g\"\n{D}"), D.into(), "end /a, /b".into()),
    ] {
        assert_eq!(planned(&before, &after).map_err(|error| error.to_string()), Ok(expected), "{before} -> {after}");
    }
}

#[test]
fn unchangeable_settings_are_reported() {
    let grouped = format!("{A}limit = \"iops=5,group=g\"\n");
    // One process serves both.
    let two = format!("{A}{}", A.replace("\"a\"", "\"b\""));
    for (before, after, words) in [
        (two.clone(), format!("{two}cache = \"none\"\ntag = \"x\""), "cache, tag of /a at /etc/ferry/b cannot change"),
        (two.clone(), two.replacen("/a", "/c", 1), "source of /a"),
        (two.clone(), format!("{two}limit = \"iops=5,group=g\""), "limit of /a"),
        (grouped.clone(), format!("{grouped}{B}limit = \"iops=5,group=g\""), "the shares of a group have one process"),
        (format!("{grouped}{B}limit = \"iops=5,group=g\""), grouped.clone(), "/b cannot be removed without /a"),
        (format!("{A}{B}"), format!("{A}9p = \"unix:b\""), "/etc/ferry/a, /etc/ferry/b is served already"),
        (memory("a", ""), memory("a", "") + &memory("b", ""), "mem is one tree, which one process serves"),
        (A.into(), format!("seccomp = \"log\"\n{A}"), "seccomp cannot change while the process runs"),
        (A.into(), format!("metrics = \"127.0.0.1:1\"\n{A}"), "metrics cannot change"),
        (A.into(), format!("{A}[[share]]\nsource = \"/b\"\nfd = 3"), "descriptor 3 of /b: descriptors are inherited"),
        (A.into(), format!("{A}{A}"), "is given twice"),
    ] {
        let error = planned(&before, &after).expect_err(&after).to_string();
        assert!(error.contains(words), "{before} -> {after}: {error}");
    }
}

#[test]
fn manual_additions_stay_until_the_file_has_them() {
    let mut units = units(&format!("{A}{B}"));
    units[1].tables = vec![None];
    let plan = |text: &str| reload(file(text), &served(&units), &Base::default());
    assert_eq!(described(&plan(A).expect("a plan"), &units), "");
    let adopts = plan(&format!("{A}{B}")).expect("a plan");
    assert_eq!((described(&adopts, &units).as_str(), adopts.tables.len()), ("", 1));
    let error = plan(&format!("{A}{B}cache = \"none\"")).expect_err("it differs").to_string();
    assert!(error.contains("/b at /etc/ferry/b was added by hand with other settings"), "{error}");
}

#[test]
fn command_lines_of_additions_are_checked() {
    let units = units(&format!("{A}quota = \"1G\"\n{D}"));
    let plan = |line: &str| {
        let words: Vec<_> = line.split(' ').map(OsString::from).collect();
        let plan = add(&words, Path::new("/srv"), &served(&units), &Base::default());
        plan.map(|plan| described(&plan, &units)).map_err(|error| error.to_string())
    };
    assert_eq!(plan("share x --virtiofs s"), Ok("start /srv/x".into()));
    assert_eq!(plan("share x --virtiofs s y --9p unix:t"), Ok("start /srv/x; start /srv/y".into()));
    assert_eq!(plan("disk x --vhost-user s"), Ok("start /srv/x".into()));
    for (line, words) in [
        ("share x --virtiofs /etc/ferry/a", "/etc/ferry/a is served already, from /a"),
        ("disk x --vhost-user /etc/ferry/d", "is served already, from /etc/ferry/d"),
        ("share x --virtiofs s y --virtiofs s", "is given twice"),
        ("share --config f", "--config and --json are for ferry share"),
        ("share x --virtiofs s --json", "--config and --json are for ferry share"),
        ("share x", "is missing after x"),
        ("disk x", "is missing after x"),
        ("share x --fd 3", "descriptor 3 of /srv/x"),
        ("share /a/b --virtiofs s", "--quota"),
        ("share /a --quota 1G --virtiofs s", "--quota"),
        ("log", "only share and disk can be added"),
        ("share x --virtiofs s --syslog", "for the whole process"),
    ] {
        let error = plan(line).expect_err(line);
        assert!(error.contains(words), "{line}: {error}");
    }
}

#[test]
fn servers_are_counted() {
    let some = |count: usize| {
        let one = |number| format!("[[share]]\nsource = \"/{number}\"\nvirtiofs = \"{number}\"\n");
        (0..count).map(one).collect::<String>()
    };
    assert!(planned(A, &some(SERVERS_MAX - 1)).is_ok());
    let error = planned(A, &some(SERVERS_MAX)).expect_err("too many").to_string();
    assert!(error.contains("1001 server processes, and 1000 are the most"), "{error}");
}

#[test]
fn the_last_server_and_parts_of_one_are_not_removed() {
    let units = units(&format!("{A}{A}{B}").replacen("\"a\"", "\"c\"", 1));
    let all = served(&units);
    assert_eq!(all.len(), 2);
    let removed = |index, item| remove(index, item, &all).map(|plan| plan.ends).map_err(|error| error.to_string());
    assert_eq!(removed(1, Some(0)), Ok(vec![1]));
    assert!(removed(0, Some(1)).is_err_and(|error| error.contains("cannot be removed without")));
    assert!(removed(2, None).is_err_and(|error| error.contains("has ended")));
    let error = remove(1, None, &all[1..]).expect_err("it is the last").to_string();
    assert!(error.contains("/b is the last that this process serves"), "{error}");
}
