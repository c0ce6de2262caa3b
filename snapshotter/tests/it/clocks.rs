//! Clocks that were wrong: times of snapshots and files that lie in the future, or in 1970.

use std::fs;
use std::path::Path;

use ferry_snapshotter::api::Timestamp;
use prost::Message;
use redb::{Database, ReadableDatabase, ReadableTable, TableDefinition};
use rustix::fs::{AtFlags, CWD, Timespec, Timestamps, utimensat};

use crate::client::{Client, root_label};
use crate::server::{Mounted, Server, can_mount};

const SNAPSHOTS: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("snapshots");
/// 1969, 1970 and 2100.
const TIMES: [i64; 3] = [-86_400, 1, 4_102_444_800];

/// Gives all snapshots a time. In a message of Protocol Buffers the last value of a field counts.
fn date_records(root: &Path, seconds: i64) {
    let database = Database::open(root.join("metadata.redb")).unwrap();
    let read = database.begin_read().unwrap().open_table(SNAPSHOTS).unwrap();
    let write = database.begin_write().unwrap();
    let mut table = write.open_table(SNAPSHOTS).unwrap();
    for entry in read.iter().unwrap() {
        let (name, record) = entry.unwrap();
        let mut record = record.value().to_vec();
        for field in [4, 5] {
            let time = Timestamp { seconds, nanos: 0 }.encode_to_vec();
            record.extend([field << 3 | 2, u8::try_from(time.len()).unwrap()]);
            record.extend(time);
        }
        table.insert(name.value(), &*record).unwrap();
    }
    drop(table);
    write.commit().unwrap();
}

/// Gives all files a time, as far as they can change.
fn date_files(at: &Path, seconds: i64) {
    if fs::symlink_metadata(at).unwrap().is_dir() {
        fs::read_dir(at).unwrap().for_each(|entry| date_files(&entry.unwrap().path(), seconds));
    }
    let time = Timespec { tv_sec: seconds, tv_nsec: 0 };
    let times = Timestamps { last_access: time, last_modification: time };
    let _ = utimensat(CWD, at, &times, AtFlags::SYMLINK_NOFOLLOW);
}

fn layer(client: &mut Client, (name, parent): (&str, &str)) {
    let mounted = Mounted::of(&client.prepare("extract-a", parent).unwrap());
    fs::write(mounted.path().join(name), name.repeat(3000)).unwrap();
    drop(mounted);
    client.commit(name, "extract-a").unwrap();
}

fn packs(server: &Server) -> usize {
    let packs = fs::read_dir(server.root().join("store/packs")).into_iter().flatten().flatten();
    packs.filter(|pack| pack.file_name() != "table").count()
}

#[test]
fn times_decide_nothing() {
    if !can_mount() {
        return;
    }
    for seconds in TIMES {
        let mut server = Server::start("auto");
        let mut client = server.client();
        ["base", "top", "gone"]
            .iter()
            .zip(["", "base", "top"])
            .for_each(|(name, parent)| layer(&mut client, (name, parent)));
        client.prepare("container", "top").unwrap();
        let before = packs(&server);
        client.remove("gone").unwrap();
        server.kill();
        let root = server.root();
        fs::create_dir_all(root.join("snapshots/77/fs")).unwrap();
        fs::create_dir_all(root.join("trash/some/more")).unwrap();
        date_records(&root, seconds);
        date_files(&root, seconds);
        let mut client = server.start_again();
        for (filter, expected) in [("", 3), ("kind==committed", 2), ("parent==base", 1), ("name==container", 1)] {
            let found = client.list(&[filter]).unwrap();
            let are_dated = found.iter().all(|info| info.created_at.unwrap().seconds == seconds);
            assert!(found.len() == expected && are_dated, "{seconds} {filter}: {found:?}");
        }
        let now = Timestamp::now();
        let info = client.stat("container").unwrap();
        let info = client.update(info, &["labels.none"]).unwrap();
        assert!(info.created_at.unwrap().seconds == seconds && info.updated_at.unwrap() >= now, "{info:?}");
        let mounted = Mounted::of(&client.mounts("container").unwrap());
        assert_eq!(fs::read_to_string(mounted.path().join("base")).unwrap(), "base".repeat(3000));
        drop(mounted);
        client.commit_with("next", "container", "", root_label()).unwrap();
        assert!(client.stat("next").unwrap().created_at.unwrap() >= now);
        date_files(&root, seconds);
        client.cleanup().unwrap();
        assert!(before == 0 || packs(&server) < before, "{seconds}: {before}");
        assert_eq!(fs::read_dir(root.join("snapshots")).unwrap().count(), 3);
        for name in ["next", "top", "base"] {
            client.remove(name).unwrap();
        }
        date_files(&root, seconds);
        client.cleanup().unwrap();
        let left = ["snapshots", "trash"].map(|directory| fs::read_dir(root.join(directory)).unwrap().count());
        assert_eq!((left, packs(&server)), ([0; 2], 0));
    }
}
