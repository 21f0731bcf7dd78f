--[[ Tries to become the one who runs the handler of a key.
     One script, because a record that is read in one step and written in another can be claimed twice.
     It has no flags line: with one, a full Redis would refuse even the replay of a finished answer.
     A new record then gets OOM from its own SET.
     Most claims do not come here: a plain SET NX GET finds the key new, or what there is to say (claim.rs).

  KEYS[1]  record    (string; the layout stands in src/record/codec.rs)
  ARGV[1]  claimant  (52 bytes: recipe id and digest 36, holder 16, as in the record)
  ARGV[2]  lease     (milliseconds)
  ARGV[3]  kept for  (milliseconds: the lease, and the retention of an unknown outcome)
  ARGV[4]  mode      (1 refuse, 2 reexecute what expired; 3, 4 the same with effects marked by checkpoints)
  ARGV[5]  accepted  (up to 3 times 36 bytes: recipe id and digest by older recipes; left out if none)
  Returns  1 acquired, attempt, fence, created (milliseconds), takeover (0 or 1), checkpoint
         | 2 in flight, remaining (milliseconds)
         | 3 completed, response
         | 4 mismatch
         | 5 indeterminate, holder, attempt, fence, checkpoint
         | 6 unreadable
]]
local time = redis.call('TIME')
local key, claimant, lease, kept_for, mode = KEYS[1], ARGV[1], tonumber(ARGV[2]), ARGV[3], ARGV[4]

local sub, pack = string.sub, struct.pack
local MAX_48, MAX_32 = 281474976710655, 4294967295
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local till = math.min(now + lease, MAX_48)
local term = pack('>I6I4', till, math.min(lease, MAX_32))
-- The first two bytes of a new attempt: in flight, or in flight and untouched.
local begun = (mode == '1' or mode == '2') and '\1\1' or '\1\5'

local record = redis.call('GET', key)
if not record then
  redis.call('SET', key, begun .. claimant .. pack('>I4I6I6', 1, now, now) .. term .. '\0\0\0\0',
    'PX', kept_for)
  return {1, 1, now, now, 0, ''}
end

local version, state = string.byte(record, 1, 2)
if version ~= 1 or #record < 84 then return {6} end
local first = state == 6 or state == 7
-- The first claim of a key leaves its times to the key's expiry. Here they are written out.
if state == 6 or state == 7 then
  local till = redis.call('PEXPIRETIME', key) - struct.unpack('>I6', record, 71)
  if till > 0 then
    local made = math.max(till - struct.unpack('>I4', record, 77), 0)
    local fence = struct.unpack('>I6', record, 59)
    if fence + 1000 < made then fence = made end
    state = state == 6 and 1 or 5
    record = '\1' .. string.char(state) .. sub(record, 3, 58)
      .. struct.pack('>I6I6I6', fence, made, till) .. sub(record, 77)
  end
end
local attempt, fence, created, at, granted, noted = struct.unpack('>I4I6I6I6I4I4', record, 55)
local answer = #record - 84 - noted
if state < 1 or state > 5 or answer ~= (state == 4 and math.max(granted, 1) or 0) then return {6} end

if state ~= 2 and sub(record, 3, 38) ~= sub(claimant, 1, 36) then
  local recipe, prints, same = sub(record, 3, 6), sub(claimant, 1, 36) .. (ARGV[5] or ''), nil
  for i = 1, #prints, 36 do
    if sub(prints, i, i + 3) == recipe then
      same = sub(prints, i + 4, i + 35) == sub(record, 7, 38)
      break
    end
  end
  if same == nil then return {6} end
  if not same then return {4} end
end

if state == 4 then return {3, sub(record, 85 + noted)} end

local owner, holder = sub(record, 39, 54), sub(claimant, 37)
local reexecute = mode == '2' or mode == '4'
local takeover = 0
if state == 1 or state == 5 then
  if owner == holder then
    -- A guess that was far too late has been told to nobody.
    if first and attempt == 1 and fence > created + 1000 then fence = created end
    redis.call('SET', key, sub(record, 1, 58) .. pack('>I6', fence) .. sub(record, 65, 70) .. term
      .. sub(record, 81), 'PX', kept_for)
    -- The first reply may have been lost, and it may have said takeover.
    return {1, attempt, fence, created, attempt > 1 and 1 or 0, sub(record, 85)}
  end
  -- A deadline more than two leases away was written before the clock went back.
  if now < at and at - now <= granted * 2 then return {2, at - now} end
  -- One that died untouched leaves its key as free as if it had said so.
  if state == 1 and not reexecute then
    redis.call('SET', key, '\1\3' .. sub(record, 3, 70) .. pack('>I6I4', now, 0) .. sub(record, 81),
      'KEEPTTL')
    return {5, owner, attempt, fence, sub(record, 85)}
  end
  takeover = state == 1 and 1 or 0
elseif state == 2 then
  -- A claim that arrives after its own sender gave the key up has nobody behind it.
  if owner == holder then return {2, 0} end
else
  if not reexecute then return {5, owner, attempt, fence, sub(record, 85)} end
  takeover = 1
end

attempt = math.min(attempt + 1, MAX_32)
fence = math.min(math.max(fence + 1, now), MAX_48)
-- What an earlier attempt may have done is not undone by one that has not begun.
if takeover == 1 then begun = '\1\1' end
redis.call('SET', key, begun .. claimant .. pack('>I4I6', attempt, fence)
  .. sub(record, 65, 70) .. term .. sub(record, 81), 'PX', kept_for)
return {1, attempt, fence, created, takeover, sub(record, 85)}
